// Measurement stores: files by tier, what is due, what runs, what the last cycles did.

import { badge, confirm, facts, grid, h, sheet, tell } from "../dom.js";
import { columns, lines } from "../charts.js";
import { get, send } from "../api.js";
import { ago, bytes, count, nothing, seconds } from "../format.js";
import { drawn } from "./mirrors.js";

const MOST = 6;

export const measurements = {
  title: "Measurements",
  every: 15,
  load: async (_argument, _query, who) => {
    if (!who.stores.measurements) return { off: true };
    const [status, jobs, history, due] = await Promise.all([get("/measurements/status"), get("/measurements/jobs"), get("/measurements/history?limit=20"), get(`/series?metric=measurements_candidates&most=${MOST}`)]);
    return { ...status, jobs, history, due };
  },
  draw(found, { who, again }) {
    const lead = h("p", { class: "lead" }, "Many small files of a time window become few large sorted ones.");
    if (found.off) return [h("h1", {}, "Measurements"), lead, h("section", { class: "sheet" }, h("p", { class: "empty" }, "No measurement store is served. Set ", h("code", {}, "MODAK_MEASUREMENTS_ENABLED=true"), " and ", h("code", {}, "MODAK_MEASUREMENTS_ROOT"), ", then start the worker again."))];
    const kinds = {};
    for (const one of found.store.measurements) for (const [tier, files] of Object.entries(one.files)) kinds[tier] = (kinds[tier] ?? 0) + files;
    return [
      h("h1", {}, "Measurements"), h("p", { class: "lead" }, `Many small files of a time window become few large sorted ones · store in ${found.store.root}`),
      facts([
        ["Measurements", count(found.store.measurements.length)],
        ["Size", bytes(found.store.measurements.reduce((all, one) => all + one.bytes, 0))],
        ["Readers", count(found.store.readers)], ["Jobs held", count(Object.values(found.store.jobs).reduce((all, one) => all + one, 0))],
      ]),
      who.scope === "read" ? null : h("div", { class: "row" }, h("button", { type: "button", onclick: () => compact(again) }, "Compact now")),
      h("div", { class: "grid" },
        sheet("Files by tier", columns(Object.entries(kinds).sort(), "Files by tier", "The store is empty.")),
        sheet("Files merged by the last cycles", columns(found.history.slice(0, 8).reverse().map((one) => [`cycle ${one.cycle_id}`, of(one, "files")]), "Files merged by the last cycles", "No cycle has merged anything yet.")),
        sheet("Windows due over the last hour", lines(drawn(found.due), "count", "Windows due")),
        sheet("When", plan(found.scheduler))),
      sheet("Measurements", grid("Due: partitions that qualify now, by tier.", [
        { title: "Database", cell: (one) => one.database }, { title: "Measurement", cell: (one) => one.measurement },
        { title: "Files", number: true, cell: (one) => count(Object.values(one.files).reduce((all, each) => all + each, 0)) },
        { title: "Size", number: true, cell: (one) => bytes(one.bytes) }, { title: "Windows", number: true, extra: true, cell: (one) => count(one.windows) },
        { title: "Due", cell: (one) => Object.entries(one.candidates).filter(([, n]) => n).map(([tier, n]) => `${tier} ${count(n)}`).join(", ") || nothing },
        { title: "Left aside", number: true, cell: (one) => (one.set_aside ? h("span", { class: "warn" }, count(one.set_aside)) : "0") },
      ], found.store.measurements, ["The store is empty. Try ", h("code", {}, "modak-worker measurements generate")])),
      found.store.problems.length ? sheet("Look at", h("ul", {}, found.store.problems.map((each) => h("li", { class: "warn" }, each)))) : null,
      sheet("Jobs", grid("As the manifests in the store tell.", [
        { title: "Job", code: true, cell: (one) => one.job }, { title: "State", cell: (one) => badge(one.status, one.status === "committed" ? "good" : null) },
        { title: "Tier", cell: (one) => one.tier }, { title: "Partition", code: true, cell: (one) => one.partition },
        { title: "Inputs", number: true, cell: (one) => count(one.inputs) }, { title: "Since", cell: (one) => ago(one.since) },
      ], found.jobs, "No job is under way.")),
      sheet("History", grid("The last cycles, newest first.", HISTORY, found.history, "No cycle has run yet.")),
    ];
  },
};

const of = (cycle, name) => (cycle.jobs ?? []).reduce((all, job) => all + Number(job[name] ?? 0), 0);
const HISTORY = [
  { title: "Cycle", cell: (one) => count(one.cycle_id) },
  { title: "Began", cell: (one) => ago(one.started_at) },
  { title: "Jobs", number: true, cell: (one) => count((one.jobs ?? []).length) },
  { title: "Files", number: true, cell: (one) => count(of(one, "files")) },
  { title: "Before", number: true, cell: (one) => bytes(of(one, "bytes_before")) },
  { title: "After", number: true, cell: (one) => bytes(of(one, "bytes_after")) },
  { title: "Took", number: true, cell: (one) => seconds(one.seconds) },
  { title: "Errors", cell: (one) => { const failed = (one.jobs ?? []).filter((job) => job.error); return failed.length ? h("span", { class: "bad" }, failed[0].error) : ""; } },
];

/** When the leader begins the next cycle of each tier, and what became of the last one. */
function plan(scheduler) {
  if (!scheduler) return h("p", { class: "empty" }, "The worker that leads compacts; this one does not lead.");
  return [
    scheduler.last_error ? h("p", { class: "bad" }, `The last cycle failed: ${scheduler.last_error}`) : null,
    scheduler.cycle_running ? h("p", {}, badge("A cycle runs now", "good")) : null,
    grid("Times are those of the schedule, in UTC.", [
      { title: "Tier", cell: ([tier]) => tier }, { title: "Schedule", code: true, cell: ([, schedule]) => schedule },
      { title: "Next", cell: ([tier]) => ago(scheduler.next_runs[tier]) },
    ], Object.entries(scheduler.schedules), "No tier is scheduled."),
  ];
}

async function compact(again) {
  if (!(await confirm("Compact now?", "A cycle over all databases begins at once.", "Compact"))) return;
  try { await send("POST", "/measurements/trigger", {}); tell("The cycle has begun."); } catch (failure) { tell([failure.message, failure.hint].filter(Boolean).join(" "), true); }
  again();
}
