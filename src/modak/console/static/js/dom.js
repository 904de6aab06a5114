// Elements without markup: text only ever becomes text, so that no value of a user can become a tag.

const SVG = "http://www.w3.org/2000/svg";

// Handlers hang on the node by name, so that `settle` can replace them with those of the newest state.
function listen(node, event, handler) {
  if (!node.handlers) node.handlers = {};
  if (!(event in node.handlers)) node.addEventListener(event, (happened) => node.handlers[event]?.(happened));
  node.handlers[event] = handler;
}

function fill(node, given, children) {
  for (const [name, value] of Object.entries(given ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) listen(node, name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

export const h = (tag, given, ...children) => fill(document.createElement(tag), given, children);
export const s = (tag, given, ...children) => fill(document.createElementNS(SVG, tag), given, children);

/** A table with a caption; a column is {title, cell(row) → node or text, number?, code?, wide?, extra?, long?}. */
export function grid(caption, columns, rows, empty) {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const kind = (column) => [column.number && "number", column.code && "code", column.wide && "bar-cell", column.extra && "hide-small", column.long && "long"].filter(Boolean).join(" ") || null;
  return h("table", {},
    h("caption", {}, caption),
    h("thead", {}, h("tr", {}, columns.map((column) => h("th", { scope: "col", class: kind(column) }, column.title)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, columns.map((column) => h("td", { class: kind(column) }, column.cell(row)))))));
}

export const sheet = (title, ...children) => h("section", { class: "sheet", "aria-label": title }, h("h2", {}, title), children);

export const facts = (pairs) => h("dl", { class: "facts" },
  pairs.filter(Boolean).map(([name, value, mood]) => h("div", { class: "fact" }, h("dt", {}, name), h("dd", { class: mood }, value))));

export const badge = (text, mood) => h("span", { class: `badge ${mood ?? "soft"}` }, text);

let counted = 0;

/** Say something that needs no answer; failures stay until they are read. */
export function tell(text, failed) {
  const place = document.getElementById("notices");
  const note = h("div", { class: failed ? "notice bad" : "notice" }, text);
  if (failed) note.append(" ", h("button", { type: "button", class: "quiet", onclick: () => note.remove() }, "Close"));
  else setTimeout(() => note.remove(), 6000);
  place.append(note);
}

/** Ask before something is done; resolves to true or false. */
export function confirm(title, text, verb) {
  const name = `ask-${++counted}`;
  return new Promise((resolve) => {
    const box = h("dialog", { "aria-labelledby": name },
      h("h2", { id: name }, title), h("p", {}, text),
      h("form", { method: "dialog" },
        h("button", { value: "no" }, "Cancel"), h("button", { value: "yes", class: "main" }, verb)));
    box.addEventListener("close", () => { box.remove(); resolve(box.returnValue === "yes"); });
    document.body.append(box);
    box.showModal();
  });
}

/** Make `old` look like `fresh` with as few changes as possible: what did not change keeps focus, scroll and selection. */
export function settle(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName || old.dataset?.keep !== fresh.dataset?.keep) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const [event, handler] of Object.entries(fresh.handlers ?? {})) listen(old, event, handler);
  // What a person types into belongs to the person.
  if (old.dataset?.keep) return;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const before = [...old.childNodes], after = [...fresh.childNodes];
  after.forEach((child, place) => (place < before.length ? settle(before[place], child) : old.append(child)));
  before.slice(after.length).forEach((child) => child.remove());
}
