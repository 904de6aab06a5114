// Every table as one bar: what is in the lake, where the cut-line runs, what is still in the heap.

import { badge, facts, grid, h, sheet } from "../dom.js";
import { seamBar } from "../charts.js";
import { get } from "../api.js";
import { ago, at, bytes, count, nothing, seconds } from "../format.js";

const PAGE = 100;

export const fleet = {
  title: "Fleet",
  every: 3,
  load: (_argument, query) => get(`/overview?limit=${PAGE}&offset=${start(query)}${query.get("q") ? `&q=${encodeURIComponent(query.get("q"))}` : ""}`),
  draw(found, { query, who }) {
    const tables = found.tables;
    return [
      h("h1", {}, "Fleet"),
      h("p", { class: "lead" }, `${found.database} · lake in ${found.warehouse} · Modak ${found.version}`),
      facts([
        ["Tables", count(found.tables_total)],
        ["Leader", found.leader.holder ?? "none", found.leader.holder ? null : "bad"],
        ["Workers", count(found.workers.length)],
        ["In the heap, this page", bytes(sum(tables, heap))],
        ["In the lake, this page", bytes(sum(tables, lake))],
        ["Need attention, this page", count(tables.filter((one) => trouble(one).length).length), tables.some((one) => trouble(one).length) ? "warn" : "good"],
      ]),
      h("section", { class: "sheet", "aria-label": "Tables" },
        h("form", { class: "row", role: "search", onsubmit: search },
          h("label", {}, "Find ", h("input", { name: "q", type: "search", value: query.get("q"), placeholder: "part of a name", "data-keep": "find" })),
          h("button", {}, "Find")),
        grid("The bar shows the lake in blue, then the cut-line, then the heap in orange.", COLUMNS, tables,
          query.get("q") ? "No table has that in its name." : `No table is registered yet. ${who.scope === "read" ? "" : "Try: modak-worker register --table public.events --pk id --tier-key occurred_at"}`),
        pager(found, query)),
      sheet("Workers", grid("Processes of this group, by their last heartbeat.", WORKERS, found.workers, "No worker has been heard of.")),
    ];
  },
};

const COLUMNS = [
  { title: "Table", cell: (one) => h("a", { href: `#/table/${one.table_id}` }, one.table) },
  { title: "Mode", cell: (one) => badge(one.keep_heap ? "keep-heap" : one.mode), extra: true },
  { title: "Lake | heap", wide: true, cell: (one) => seamBar(lake(one), heap(one), one.cutline_t_text) },
  { title: "Cut-line", code: true, extra: true, cell: (one) => one.cutline_t_text ?? one.mirror_frontier ?? nothing },
  { title: "Backlog", number: true, extra: true, cell: (one) => count(one.delta_backlog) },
  { title: "Health", cell: (one) => health(one) },
  { title: "Last operation", cell: (one) => (one.last_kind ? h("span", { title: at(one.last_at) }, `${one.last_kind} ${one.last_phase}, ${ago(one.last_at)}`) : nothing) },
];

const WORKERS = [
  { title: "Worker", code: true, cell: (one) => one.holder },
  { title: "Role", cell: (one) => badge(one.role, one.role === "leading" ? "good" : "soft") },
  { title: "Version", cell: (one) => one.version },
  { title: "Started", cell: (one) => ago(one.started_at) },
  { title: "Heard of", cell: (one) => h("span", { class: one.silent_seconds > 30 ? "bad" : null }, `${seconds(one.silent_seconds)} ago`) },
];

const start = (query) => Math.max(0, Number.parseInt(query.get("from") ?? "0", 10) || 0);
const sum = (rows, of) => rows.reduce((all, row) => all + Number(of(row) ?? 0), 0);
export const heap = (one) => Number(one.heap_bytes ?? 0);
export const lake = (one) => Number(one.lake?.bytes ?? one.lake?.data_bytes ?? 0);

/** What somebody should look at, worst first. */
export function trouble(one) {
  return [
    one.frozen ? "frozen by a foreign commit" : null,
    one.last_error ? `last error: ${one.last_error}` : null,
    ...(one.problems ?? []).map((each) => (typeof each === "string" ? each : each.problem ?? each.message ?? JSON.stringify(each))),
    ...(one.lake_warnings ?? []).map((each) => (typeof each === "string" ? each : each.message ?? each.warning ?? JSON.stringify(each))),
  ].filter(Boolean);
}

function health(one) {
  if (one.paused_at) return badge("paused", "warn");
  const found = trouble(one);
  if (found.length) return h("a", { href: `#/table/${one.table_id}`, title: found.join("\n") }, badge(one.frozen || one.last_error ? "failing" : `${found.length} to look at`, one.frozen || one.last_error ? "bad" : "warn"));
  return badge(one.copying ? "copying" : "good", one.copying ? "soft" : "good");
}

function search(happened) {
  happened.preventDefault();
  const wanted = new FormData(happened.target).get("q").trim();
  location.hash = wanted ? `#/fleet?q=${encodeURIComponent(wanted)}` : "#/fleet";
}

function pager(found, query) {
  const from = start(query);
  if (found.tables_total <= PAGE && !from) return null;
  const link = (begin, text) => h("a", { href: `#/fleet?${new URLSearchParams({ ...(query.get("q") ? { q: query.get("q") } : {}), from: begin })}` }, text);
  return h("nav", { class: "row", "aria-label": "Pages of tables" },
    from ? link(Math.max(0, from - PAGE), "Earlier") : null,
    h("span", { class: "soft" }, `${from + 1} to ${from + found.tables.length} of ${count(found.tables_total)}`),
    found.tables.length === PAGE ? link(from + PAGE, "Later") : null);
}
