// Every table as one bar: what is in the lake, where the cut-line runs, what is still in the heap.

import { badge, facts, grid, h, sheet } from "../dom.js";
import { seamBar } from "../charts.js";
import { get } from "../api.js";
import { ago, at, bytes, count, nothing, seconds } from "../format.js";

const PAGE = 100;

export const fleet = {
  title: "Fleet",
  every: 3,
  load(_argument, query) {
    const asked = new URLSearchParams({ limit: PAGE, offset: start(query) });
    for (const name of ["q", "mode", "attention"]) if (query.get(name)) asked.set(name, query.get(name));
    return get(`/overview?${asked}`);
  },
  draw(found, { query, who }) {
    const tables = found.tables;
    const here = found.tables_found > tables.length ? ", this page" : "";
    const leading = found.workers.find((one) => one.holder === found.leader.holder);
    const chosen = query.get("q") || query.get("mode") || query.get("attention");
    return [
      h("h1", {}, "Fleet"),
      h("p", { class: "lead" }, `${found.database} · lake in ${found.warehouse} · Modak ${found.version}`),
      facts([
        ["Tables", count(found.tables_total)],
        ["Leader", found.leader.holder ? h("code", {}, found.leader.holder) : "none", found.leader.holder && !leading?.late ? null : "warn"],
        ["Workers", count(found.workers.length)],
        [`In the heap${here}`, bytes(sum(tables, heap))],
        [`In the lake${here}`, `${bytes(sum(tables, lake))}${tables.some((one) => lake(one) === null) ? " or more" : ""}`],
        ["Need attention", found.tables_attention ? h("a", { href: "#/fleet?attention=true" }, count(found.tables_attention)) : "0", found.tables_attention ? "warn" : "good"],
      ]),
      leading?.late ? h("p", { class: "warn" }, `The leader has not been heard of for ${seconds(leading.silent_seconds)}. If it is gone, another worker leads when its lease ends, in ${seconds(found.leader.seconds_left)}.`) : null,
      found.leader.holder ? null : found.workers.some((one) => one.role === "starting" && !one.late) ? h("p", { class: "warn" }, "Nobody leads yet: a worker is starting.") : h("p", { class: "bad" }, "Nobody leads, so no table is worked on. Is a worker running, and can it reach Postgres? modak-worker top tells."),
      h("section", { class: "sheet", "aria-label": "Tables" },
        h("form", { class: "row", role: "search", onsubmit: search, "data-keep": "search" },
          h("label", {}, "Find ", h("input", { name: "q", type: "search", value: query.get("q"), placeholder: "part of a name" })),
          h("label", {}, "Mode ", h("select", { name: "mode" }, ["", "tiered", "mirrored"].map((mode) => h("option", { value: mode, selected: mode === (query.get("mode") ?? "") }, mode || "any")))),
          h("label", {}, h("input", { type: "checkbox", name: "attention", value: "true", checked: query.get("attention") === "true" }), "only what needs attention"),
          h("button", {}, "Find"), chosen ? h("a", { href: "#/fleet" }, "All") : null),
        grid("The bar shows the lake in blue, then the cut-line, then the heap in orange. Lag: from the cut-line to the end of the last partition with rows, or what a mirror has not brought into the lake yet.", COLUMNS, tables,
          chosen ? "No table fits." : ["No table is registered yet. ", who.scope === "read" ? null : ["Try ", h("code", {}, "modak-worker register --table public.events --pk id --tier-key occurred_at")]]),
        pager(found, query)),
      sheet("Workers", grid("Processes of this group, by their last heartbeat.", WORKERS, found.workers, ["No worker has been heard of. Start one: ", h("code", {}, "modak-worker run")])),
    ];
  },
};

const COLUMNS = [
  { title: "Table", long: true, cell: (one) => h("a", { href: `#/table/${one.table_id}` }, one.table) },
  { title: "Mode", cell: (one) => badge(one.keep_heap ? "keep-heap" : one.mode), extra: true },
  { title: "Lake | heap", wide: true, cell: bar },
  { title: "Cut-line", code: true, extra: true, cell: (one) => one.cutline_t_text ?? one.mirror_frontier ?? nothing },
  { title: "Lag", number: true, cell: lag },
  { title: "Backlog", number: true, extra: true, cell: (one) => count(one.delta_backlog) },
  { title: "Health", cell: (one) => health(one) },
  { title: "Last operation", cell: (one) => (one.last_kind ? h("span", { title: at(one.last_at) }, `${one.last_kind} ${one.last_phase}, ${ago(one.last_at)}`) : nothing) },
];

const WORKERS = [
  { title: "Worker", code: true, cell: (one) => one.holder },
  { title: "Role", cell: (one) => badge(one.late ? `${one.role}, late` : one.role, one.late ? "bad" : one.role === "leading" ? "good" : "soft") },
  { title: "Version", extra: true, cell: (one) => one.version },
  { title: "Started", extra: true, cell: (one) => ago(one.started_at) },
  { title: "Heard of", cell: (one) => h("span", { class: one.late ? "bad" : null }, `${seconds(one.silent_seconds)} ago`) },
  { title: "Does", long: true, cell: (one) => doing(one) },
];

/** What a worker is at: a few pieces of work, how many wait, how many fail. */
function doing(one) {
  const running = one.doing.running ?? [], failing = one.doing.failing ?? [];
  // The lists end somewhere, their numbers do not.
  const all = { running: running.length, failing: failing.length, ...one.doing.counts };
  const words = running.slice(0, 3).map((item) => `${item.kind} ${item.table}`.trim());
  if (all.running > 3) words.push(`${all.running - 3} more`);
  return [
    words.join(", ") || (one.role === "leading" ? "nothing to do" : nothing),
    one.doing.waiting ? `, ${count(one.doing.waiting)} waiting` : "",
    all.failing ? [" ", h("a", { href: "#/errors" }, badge(`${count(all.failing)} failing`, "bad"))] : "",
  ];
}

const start = (query) => Math.max(0, Number.parseInt(query.get("from") ?? "0", 10) || 0);
const sum = (rows, of) => rows.reduce((all, row) => all + Number(of(row) ?? 0), 0);
export const heap = (one) => Number(one.heap_bytes ?? 0);
/** Bytes in the lake; null: rows are there, and nobody has measured them yet. */
export const lake = (one) => one.lake?.bytes ?? (one.cutline_s === null ? 0 : null);

function bar(one) {
  if (lake(one) === null) return h("span", { class: "soft" }, `${bytes(heap(one))} in the heap; the lake is measured within a minute`);
  return seamBar(Number(lake(one)), heap(one), one.cutline_t_text);
}

/** How far the lake is behind: on the tier key, or in WAL and time where the table is mirrored. */
export function lag(one) {
  if (one.mode !== "mirrored") return one.lag ? `≤ ${one.lag}` : nothing;
  if (one.mirror_lag_bytes === null) return nothing;
  return `${bytes(one.mirror_lag_bytes)}, ${seconds(one.mirror_lag_seconds)}`;
}

/** What somebody should look at, worst first: {text, hint}. */
export function trouble(one) {
  const said = (each, hint) => (typeof each === "string" ? { text: each, hint } : { text: each.message ?? (each.partition ? `${each.partition}: ${each.problem}` : each.problem ?? JSON.stringify(each)), hint: each.hint ?? hint });
  return [
    one.frozen ? { text: "frozen by a foreign commit", hint: "Somebody else committed to the lake table: compare, then accept it on the table's page." } : null,
    one.mirror_error ? { text: `mirror: ${one.mirror_error}`, hint: null } : null,
    one.last_error ? { text: `last error: ${one.last_error}`, hint: null } : null,
    ...(one.problems ?? []).map((each) => said(each, "Look at the partitions on the table's page.")),
    ...(one.lake_warnings ?? []).filter((each) => each.name !== "frozen").map((each) => said(each, null)),
  ].filter(Boolean);
}

function health(one) {
  if (one.paused_at) return h("span", { title: `by ${one.paused_by}${one.pause_reason ? `: ${one.pause_reason}` : ""}` }, badge("paused", "warn"));
  const found = trouble(one);
  const failing = one.frozen || one.last_error || one.mirror_error;
  if (found.length) return h("a", { href: `#/table/${one.table_id}`, title: found.map((each) => each.text).join("\n") }, badge(failing ? "failing" : `${found.length} to look at`, failing ? "bad" : "warn"));
  return badge(one.copying ? "copying" : "good", one.copying ? "soft" : "good");
}

function search(happened) {
  happened.preventDefault();
  const asked = new URLSearchParams();
  for (const [name, value] of new FormData(happened.target)) if (value.trim()) asked.set(name, value.trim());
  location.hash = `#/fleet${asked.size ? `?${asked}` : ""}`;
}

function pager(found, query) {
  const from = start(query);
  if (found.tables_found <= PAGE && !from) return null;
  const link = (begin, text) => {
    const asked = new URLSearchParams(query);
    asked.set("from", begin);
    return h("a", { href: `#/fleet?${asked}` }, text);
  };
  return h("nav", { class: "row", "aria-label": "Pages of tables" },
    from ? link(Math.max(0, from - PAGE), "Earlier") : null,
    h("span", { class: "soft" }, `${count(from + 1)} to ${count(from + found.tables.length)} of ${count(found.tables_found)}`),
    from + found.tables.length < found.tables_found ? link(from + PAGE, "Later") : null);
}
