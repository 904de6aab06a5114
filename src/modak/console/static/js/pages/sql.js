// SQL over the seam: registered tables by their own names, heap and lake as one, read only.

import { grid, h, sheet } from "../dom.js";
import { get, send } from "../api.js";
import { count, seconds } from "../format.js";

export const sql = {
  title: "SQL",
  every: 0,
  load: () => get("/schema"),
  draw(tables, { who }) {
    const first = tables[0]?.table;
    const before = sessionStorage.getItem("modak-query");
    const text = h("textarea", { id: "query", spellcheck: "false", autocomplete: "off", "aria-describedby": "query-help" }, before ?? (first ? `SELECT count(*) FROM ${first}` : "SELECT 1"));
    const place = h("div", { "aria-live": "polite" });
    const run = h("button", { type: "button", class: "main", onclick: () => ask("/query", answer) }, "Run");
    const explain = h("button", { type: "button", onclick: () => ask("/explain", routes) }, "Explain");
    text.addEventListener("keydown", (happened) => { if (happened.key === "Enter" && (happened.ctrlKey || happened.metaKey)) { happened.preventDefault(); run.click(); } });

    async function ask(path, show) {
      run.disabled = explain.disabled = true;
      sessionStorage.setItem("modak-query", text.value);
      place.replaceChildren(h("section", { class: "sheet" }, h("p", { class: "soft" }, "Asking heap and lake …")));
      try {
        place.replaceChildren(...[show(await send("POST", path, { sql: text.value }))].flat());
      } catch (failure) {
        place.replaceChildren(h("section", { class: "sheet" }, h("p", { class: "bad" }, failure.message), failure.hint ? h("p", {}, failure.hint) : ""));
      } finally {
        run.disabled = explain.disabled = false;
      }
    }

    return [
      h("h1", {}, "SQL"),
      h("p", { class: "lead", id: "query-help" }, `Spark SQL over registered tables, all read at one moment. Only queries, at most ${count(who.limits.rows)} rows and ${seconds(who.limits.seconds)}. Ctrl-Enter runs.`),
      h("section", { class: "sheet", "aria-label": "Query" }, h("label", { for: "query" }, "Query"), text, h("div", { class: "row" }, run, explain)),
      place,
      sheet("Tables", tables.length ? tables.map((one) => h("details", {}, h("summary", {}, one.table),
        grid(`Key ${one.pk_columns.join(", ")}, tier key ${one.tier_key}.`, [{ title: "Column", code: true, cell: (column) => column.name }, { title: "Type", code: true, cell: (column) => column.type }], one.columns, "No columns."))) : h("p", { class: "empty" }, "No table is registered.")),
    ];
  },
};

function answer(found) {
  const columns = found.columns.map((column, place) => ({ title: `${column.name} (${column.type})`, code: true, cell: (row) => (row[place] === null ? h("span", { class: "soft" }, "NULL") : row[place]) }));
  return sheet("Answer", grid(`${count(found.rows.length)} ${found.rows.length === 1 ? "row" : "rows"} in ${seconds(found.seconds)}${found.truncated ? ", more were left out" : ""}.`, columns, found.rows, `No rows, in ${seconds(found.seconds)}.`));
}

function routes(found) {
  return [
    sheet("What would be read", grid("Per use of a table.", [
      { title: "Table", cell: (one) => one.table }, { title: "Columns", cell: (one) => one.columns?.join(", ") ?? "all" }, { title: "Filter", code: true, cell: (one) => one.filter ?? "none" },
      { title: "Heap", code: true, cell: (one) => (one.heap?.from === null || !one.heap ? "all" : `≥ ${one.heap.from}`) },
      { title: "Lake", code: true, cell: (one) => (one.lake ? `snapshot ${one.lake.snapshot ?? "none"}${one.lake.below === null ? "" : `, < ${one.lake.below}`}` : "none") },
    ], found.scans, "No registered table is read.")),
    found.postgres?.length ? sheet("In Postgres itself", h("pre", {}, found.postgres.join("\n"))) : "",
  ];
}
