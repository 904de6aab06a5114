// What goes wrong now, what went wrong lately, and what to do about it.

import { badge, grid, h, sheet } from "../dom.js";
import { get } from "../api.js";
import { count, seconds } from "../format.js";
import { trouble } from "./fleet.js";
import { operationColumns } from "./operations.js";

// The journal keeps the sentence of an error; what helps is known by what it speaks of.
const HELP = [
  [/space|no room|disk/i, "Free space in the warehouse or below MODAK_HOME; the operation is planned anew by itself."],
  [/lock|timeout|waiting/i, "Somebody holds the table; look for open transactions in pg_stat_activity. It is tried again by itself."],
  [/permission|denied|privilege/i, "Grant the worker's role what docs/production.md lists."],
  [/slot|wal/i, "Look at the mirrors page; a lost slot is anchored anew without copying everything."],
  [/foreign|frozen/i, "Somebody else committed to the lake table: compare, then accept it on the table's page."],
  [/connect|refused|closed|terminat/i, "Postgres was away; the worker goes on by itself when it answers again."],
  [/storage|s3|bucket|credential/i, "Check the storage profile: modak-worker profile check."],
];

export const errors = {
  title: "Errors",
  every: 5,
  load: async () => {
    const [journal, overview] = await Promise.all([get("/operations?limit=100&failed=true"), get("/overview?limit=1000&attention=true")]);
    const failing = overview.workers.flatMap((worker) => (worker.doing.failing ?? []).map((each) => ({ ...each, holder: worker.holder })));
    return { journal, failing, tables: overview.tables };
  },
  draw(found) {
    const columns = [...operationColumns(true).filter((one) => one.title !== "Counted" && one.title !== "Epoch"), { title: "What to do", long: true, cell: (one) => advice(one.error) }];
    return [
      h("h1", {}, "Errors"),
      h("p", { class: "lead" }, "An error stops one table, never the others, and loses nothing: what was not committed is cleaned up and planned anew."),
      sheet("Failing now", grid("Work that has failed and waits for its next try.", FAILING, found.failing, "Nothing fails now.")),
      sheet("Tables that need attention", grid("As they are now.", [
        { title: "Table", cell: (one) => h("a", { href: `#/table/${one.table_id}` }, one.table) },
        { title: "What", long: true, cell: (one) => listed(trouble(one).map((each) => each.text)) },
        { title: "What to do", long: true, cell: (one) => listed([...new Set(trouble(one).map((each) => each.hint || advice(each.text)))]) },
      ], found.tables, "Every table is well.")),
      sheet("Operations that failed", grid("Newest first.", columns, found.journal, "No operation has failed.")),
    ];
  },
};

const FAILING = [
  { title: "Work", cell: (one) => `${one.kind} ${one.table}`.trim() },
  { title: "Code", code: true, cell: (one) => one.code },
  { title: "What", long: true, cell: (one) => h("span", { class: "bad" }, one.message || "It crashed; the log has the details.") },
  { title: "What to do", long: true, cell: (one) => one.hint || advice(`${one.code} ${one.message}`) },
  { title: "Failed", number: true, cell: (one) => (one.times === 1 ? "once" : `${count(one.times)} times`) },
  { title: "Again", cell: (one) => badge(one.again_in_seconds === null ? "when due" : one.again_in_seconds > 0 ? `in ${seconds(one.again_in_seconds)}` : "now", "warn") },
];

const listed = (texts) => (texts.length === 1 ? texts[0] : h("ul", {}, texts.map((each) => h("li", {}, each))));

const advice = (text) => HELP.find(([speaksOf]) => speaksOf.test(text ?? ""))?.[1] ?? "Nothing to do now; if it comes again, modak-worker status --table says more.";
