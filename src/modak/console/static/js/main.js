// The frame: which page is shown, how it stays fresh, who is signed in, light or dark.

import { h, settle, tell } from "./dom.js";
import { Failure, session, signIn, signOut } from "./api.js";
import { seconds } from "./format.js";
import { entities } from "./pages/entities.js";
import { errors } from "./pages/errors.js";
import { fleet } from "./pages/fleet.js";
import { measurements } from "./pages/measurements.js";
import { mirrors } from "./pages/mirrors.js";
import { operations } from "./pages/operations.js";
import { sql } from "./pages/sql.js";
import { table } from "./pages/table.js";

// A page is {name, title, every (seconds), load(argument, query, who) → data, draw(data, tools) → nodes}.
const PAGES = { fleet, sql, mirrors, operations, measurements, entities, errors, table };
const LISTED = ["fleet", "sql", "mirrors", "operations", "measurements", "entities", "errors"];

const main = document.getElementById("main");
let shown = 0, timer = null, who = null;

function theme(next) {
  const chosen = next ?? localStorage.getItem("modak-theme") ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = chosen;
  const button = document.getElementById("theme");
  button.textContent = chosen === "dark" ? "Light theme" : "Dark theme";
  button.onclick = () => { const other = chosen === "dark" ? "light" : "dark"; localStorage.setItem("modak-theme", other); theme(other); };
}

function place() {
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/").map(decodeURIComponent);
  return { name: name in PAGES ? name : "fleet", argument: rest.join("/"), query: new URLSearchParams(search ?? "") };
}

function navigation(current) {
  const pages = LISTED.filter((name) => name !== "sql" || who?.sql);
  document.getElementById("nav").replaceChildren(...pages.map((name) =>
    h("a", { href: `#/${name}`, "aria-current": name === current || (name === "fleet" && current === "table") ? "page" : null }, PAGES[name].title)));
}

async function show() {
  const turn = ++shown;
  clearTimeout(timer);
  const { name, argument, query } = place();
  const page = PAGES[name];
  navigation(name);
  document.title = `${page.title} · Modak`;
  main.setAttribute("aria-busy", "true");
  main.replaceChildren(h("h1", {}, page.title), h("p", { class: "lead" }, "Loading …"));
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
  let first = true;
  const tools = { who, again: () => refresh(), argument, query };

  async function refresh() {
    clearTimeout(timer);
    try {
      const data = await page.load(argument, query, who);
      if (turn !== shown) return;
      const fresh = h("div", {}, page.draw(data, tools));
      if (first) main.replaceChildren(fresh); else settle(main.firstElementChild, fresh);
      first = false;
      heard(null);
    } catch (failure) {
      if (turn !== shown) return;
      if (failure instanceof Failure && failure.status === 401) return door();
      heard(failure);
      if (first) main.replaceChildren(h("h1", {}, page.title), h("section", { class: "sheet" }, h("p", { class: "bad" }, failure.message), failure.hint ? h("p", {}, failure.hint) : ""));
    } finally {
      if (turn === shown) {
        main.setAttribute("aria-busy", "false");
        if (page.every) timer = setTimeout(() => (document.hidden ? wake() : refresh()), page.every * 1000);
      }
    }
  }

  // A page that nobody looks at asks nothing; it is fresh again as soon as somebody does.
  function wake() { document.addEventListener("visibilitychange", () => turn === shown && refresh(), { once: true }); }

  await refresh();
}

let silentSince = null;

function heard(failure) {
  const state = document.getElementById("state");
  // A refusal is an answer too: the page itself says what was refused.
  if (failure && !(failure instanceof Failure)) {
    silentSince ??= Date.now();
    state.textContent = `No answer for ${seconds((Date.now() - silentSince) / 1000)}`;
    state.title = failure.message;
    state.className = "state bad";
  } else {
    silentSince = null;
    state.textContent = failure ? "Refused" : "Live";
    state.title = failure?.message ?? "";
    state.className = failure ? "state warn" : "state good";
  }
}

function door() {
  shown += 1;
  clearTimeout(timer);
  document.getElementById("nav").replaceChildren();
  document.title = "Sign in · Modak";
  const field = h("input", { type: "password", id: "token", autocomplete: "current-password", required: true });
  const form = h("form", { class: "sheet door", onsubmit: enter },
    h("h1", {}, "Sign in"), h("p", { class: "soft" }, "With the token in MODAK_API_TOKEN, or MODAK_API_READ_TOKEN to look only."),
    h("label", { for: "token" }, "Token"), field, h("button", { class: "main" }, "Sign in"));
  main.replaceChildren(form);
  main.setAttribute("aria-busy", "false");
  field.focus();

  async function enter(happened) {
    happened.preventDefault();
    try {
      who = await signIn(field.value);
      await begin();
    } catch (failure) {
      field.value = "";
      tell(failure.message, true);
    }
  }
}

async function begin() {
  who = await session();
  const leave = document.getElementById("leave");
  leave.hidden = !(who.needs_login && who.signed_in);
  leave.onclick = async () => { await signOut(); location.reload(); };
  if (who.needs_login && !who.signed_in) return door();
  return show();
}

theme();
addEventListener("hashchange", () => (who && (!who.needs_login || who.signed_in) ? show() : door()));
begin().catch((failure) => { heard(failure); main.replaceChildren(h("h1", {}, "Modak"), h("p", { class: "bad" }, failure.message)); main.setAttribute("aria-busy", "false"); });
