// The journal: what was done, what was resumed after a crash, what failed.

import { badge, grid, h } from "../dom.js";
import { get } from "../api.js";
import { ago, at, count, nothing, seconds } from "../format.js";

const MOODS = { done: "good", committed: "good", failed: "bad", abandoned: "warn" };
const ENDED = "its files were removed; what is still to be done is planned anew";
const MEANING = { failed: `failed, ${ENDED}`, abandoned: `cut off or no longer needed, ${ENDED}`, committed: "landed; tidying is left", planned: "under way, or left by a crash", writing: "under way, or left by a crash", prepared: "under way, or left by a crash" };

export function operationColumns(withTable) {
  return [
    withTable ? { title: "Table", cell: (one) => (one.table && one.table_id !== null ? h("a", { href: `#/table/${one.table_id}` }, one.table) : one.table ?? nothing) } : null,
    { title: "Operation", cell: (one) => one.kind },
    { title: "Phase", cell: (one) => h("span", { title: MEANING[one.phase] }, badge(one.phase, MOODS[one.phase]), one.attempt > 1 ? ` ${one.attempt} attempts` : "") },
    { title: "Epoch", number: true, extra: true, cell: (one) => count(one.epoch) },
    { title: "Began", cell: (one) => h("span", { class: "when", title: at(one.started_at) }, ago(one.started_at)) },
    { title: "Took", number: true, cell: (one) => seconds(one.seconds) },
    { title: "Counted", extra: true, long: true, cell: (one) => counted(one.counters) },
    { title: "Error", long: true, cell: (one) => (one.error ? h("span", { class: "bad" }, one.error) : "") },
  ].filter(Boolean);
}

const counted = (counters) => Object.entries(counters ?? {}).filter(([, value]) => typeof value === "number").slice(0, 6).map(([name, value]) => `${name} ${count(value)}`).join(", ");

export const operations = {
  title: "Operations",
  every: 4,
  load(_argument, query) {
    const asked = new URLSearchParams({ limit: "100" });
    for (const name of ["kind", "phase", "failed", "before"]) if (query.get(name)) asked.set(name, query.get(name));
    return get(`/operations?${asked}`);
  },
  draw(found, { query }) {
    const last = found[found.length - 1];
    return [
      h("h1", {}, "Operations"),
      h("p", { class: "lead" }, "The journal of all tables. What a crash cut off, the next leader finishes if it had landed; if not, it is abandoned, its files are removed, and it is planned anew. What an error ended is failed, with its reason."),
      h("section", { class: "sheet", "aria-label": "Journal" },
        h("form", { class: "row", onsubmit: filter, "data-keep": "filter" },
          h("label", {}, "Kind ", h("input", { name: "kind", value: query.get("kind"), placeholder: "tier, fold, …" })),
          h("label", { for: "phase" }, "Phase"), h("select", { id: "phase", name: "phase" }, ["", "planned", "writing", "prepared", "committed", "done", "failed", "abandoned"].map((phase) => h("option", { value: phase, selected: phase === (query.get("phase") ?? "") }, phase || "any"))),
          h("label", {}, h("input", { type: "checkbox", name: "failed", value: "true", checked: query.get("failed") === "true" }), "only errors"),
          h("button", {}, "Filter"), query.size ? h("a", { href: "#/operations" }, "All") : null, h("a", { href: "#/operations?phase=abandoned" }, "Cut off by a crash")),
        grid("Newest first.", operationColumns(true), found, "Nothing in the journal fits."),
        found.length === 100 ? h("a", { href: `#/operations?${earlier(query, last)}` }, "Earlier") : null),
    ];
  },
};

function earlier(query, last) {
  const asked = new URLSearchParams(query);
  asked.set("before", last.started_at);
  return asked;
}

function filter(happened) {
  happened.preventDefault();
  const asked = new URLSearchParams();
  for (const [name, value] of new FormData(happened.target)) if (value) asked.set(name, value);
  location.hash = `#/operations${asked.size ? `?${asked}` : ""}`;
}
