// One table in full: its partitions along the tier key, files, snapshots and pins, policy, and what an operator can do.

import { badge, confirm, facts, grid, h, sheet, tell } from "../dom.js";
import { axisOf, columns, timeline } from "../charts.js";
import { get, send } from "../api.js";
import { ago, bytes, count, many, nothing, seconds, share } from "../format.js";
import { operationColumns } from "./operations.js";

export const table = {
  title: "Table",
  every: 4,
  async load(argument) {
    const base = `/tables/${encodeURIComponent(argument)}`;
    // A lake that cannot be read now must not hide the rest, least of all what to do about it.
    const part = (path) => get(`${base}${path}`).catch((failure) => { if (failure.status === 401) throw failure; return { failure }; });
    const [found, files, snapshots] = await Promise.all([get(base), part("/files"), part("/snapshots")]);
    return { ...found, files, snapshots };
  },
  draw(found, tools) {
    const { status, registration, cutline } = found;
    return [
      h("h1", {}, registration.table, " ", badge(registration.keep_heap ? "keep-heap" : registration.mode), found.pause ? badge("paused", "warn") : null),
      h("p", { class: "lead" }, `key ${registration.primary_key.join(", ")} · tier key ${registration.tier_key} (${registration.axis}) · ${registration.location}`),
      actions(found, tools),
      status?.problems?.length ? sheet("Look at", h("ul", {}, status.problems.map((each) => h("li", { class: "warn" }, each)))) : null,
      facts([
        ["Cut-line T", status?.cut_line ?? nothing], ["Highest key", status?.high_water ?? nothing],
        status?.retention_line ? ["Retention line R", status.retention_line] : null,
        cutline.frontier ? ["Frontier F", cutline.frontier] : null,
        ["Lag", status?.lag ?? nothing], ["Heap", bytes(status?.heap_bytes)], ["Lake", bytes(status?.lake_bytes)],
        ["Lake rows", count(status?.lake_rows)], ["Corrections waiting", count(status?.delta_backlog)], ["Readers' pins", count(status?.pins)],
        ["Delete debt", share(found.health?.counters?.delete_ratio), found.health?.warnings?.some((each) => each.name.startsWith("delete")) ? "warn" : null],
        ["Last pass", ago(found.health?.maintained_at)],
      ]),
      sheet("Partitions along the tier key", axisOf(found.partitions, cutline.t, cutline.retention_line, { cut: status?.cut_line, floor: status?.retention_line }), partitions(found.partitions)),
      h("div", { class: "grid" },
        sheet("Files by size", found.files.failure ? refused(found.files.failure) : [columns(classes(found.files), "Data files by size", "No file in the lake yet."), debt(found)]),
        sheet("Snapshots and pins", found.snapshots.failure ? refused(found.snapshots.failure) : timeline(moments(found.snapshots), found.snapshots.pins.map((pin) => ({ since: pin.created_at, holder: pin.holder }))), pins(found.pins))),
      sheet("Last maintenance pass", asked(found.last_request), pass(found)),
      sheet("Last operations", grid("Newest first.", operationColumns(false), found.operations, "Nothing has been done to this table yet.")),
      sheet("Policy in force", policy(found, tools)),
    ];
  },
};

const refused = (failure) => [h("p", { class: "warn" }, failure.message), failure.hint ? h("p", {}, failure.hint) : null];

/** Rows that are deleted and still stored, and what the last look at the lake found. */
function debt(found) {
  const seen = found.health?.counters;
  const words = [found.files.files_with_deletes === 1 ? "1 file carries deletes" : `${count(found.files.files_with_deletes)} files carry deletes`];
  if (seen?.deleted_rows !== undefined) words.push(`${count(seen.deleted_rows)} of ${count(seen.records)} stored rows are deleted (${share(seen.delete_ratio)})`);
  return [
    h("p", { class: "soft" }, `${words.join(", ")}.`),
    found.health?.warnings?.length ? h("ul", {}, found.health.warnings.map((each) => h("li", {}, h("span", { class: "warn" }, each.message), ` ${each.hint ?? ""}`))) : null,
  ];
}

/** A pass that somebody asked for, until it has ended. */
function asked(request) {
  if (!request || request.finished_at) return request?.error ? h("p", { class: "bad" }, `The pass that ${request.requested_by} asked for failed: ${request.error}`) : null;
  const { pass: step, done, total } = request.progress ?? {};
  const far = step ? `: ${STEPS[step] ?? step}${total ? `, ${count(done)} of ${count(total)}` : ""}` : "";
  return h("p", { class: "soft" }, request.claimed_at ? `A pass runs now${far}.` : `A pass was asked for ${ago(request.requested_at)} by ${request.requested_by} and waits for the leader.`);
}

const STEPS = { debt: "Deletes applied", pack: "Small files merged", manifests: "Manifests rewritten", expiry: "Snapshots expired", orphans: "Orphans removed" };

/** What the last pass that had anything to do did, step by step. */
function pass(found) {
  const last = found.last_pass;
  if (!last) return h("p", { class: "empty" }, found.health?.maintained_at ? `The last pass, ${ago(found.health.maintained_at)}, had nothing to do.` : "No pass has run yet.");
  const steps = Object.entries(last.counters ?? {}).filter(([, did]) => did && typeof did === "object");
  return grid(`${ago(last.started_at)}, ${last.phase}, took ${seconds(last.seconds)}.`, [
    { title: "Step", cell: ([name]) => STEPS[name] ?? name },
    { title: "Did", long: true, cell: ([, did]) => Object.entries(did).filter(([name, value]) => typeof value === "number" && name !== "seconds").map(([name, value]) => `${name.replaceAll("_", " ")} ${count(value)}`).join(", ") || nothing },
    { title: "Took", number: true, cell: ([, did]) => seconds(did.seconds) },
    { title: "Error", long: true, cell: ([, did]) => (did.error ? h("span", { class: "bad" }, did.error) : "") },
  ], steps, last.error ? h("span", { class: "bad" }, last.error) : "It had nothing to count.");
}

function classes(files) {
  return files.classes.map((one, place) => [one.below === null ? `≥ ${bytes(files.classes[place - 1].below)}` : `< ${bytes(one.below)}`, one.files]);
}

const moments = (found) => found.snapshots.map((one) => ({ id: one.id, at: one.at, operation: one.operation, current: String(one.id) === String(found.published) }));

const pins = (found) => grid("A pin keeps what a reader needs until it ends or lapses.", [
  { title: "Reader", cell: (one) => one.holder }, { title: "Since", cell: (one) => ago(one.created_at) },
  { title: "Lapses", cell: (one) => ago(one.expires_at) }, { title: "Snapshot", code: true, cell: (one) => one.snapshot_id ?? nothing },
], found, "Nobody reads at a pinned point now.");

function partitions(found) {
  const living = found.filter((one) => one.state !== "dropped");
  return h("details", {}, h("summary", {}, `${many(living.length, "partition")} in Postgres`), grid("In the order of the tier key.", [
    { title: "Partition", code: true, cell: (one) => one.name }, { title: "From", number: true, cell: (one) => one.lower_text ?? "MINVALUE" },
    { title: "To", number: true, cell: (one) => one.upper_text ?? "MAXVALUE" }, { title: "State", cell: (one) => badge(one.state, one.problem ? "warn" : null) },
    { title: "Problem", long: true, cell: (one) => one.problem ?? "" },
  ], living, "None."));
}

function actions(found, { who, again }) {
  if (who.scope === "read") return h("p", { class: "soft" }, "Signed in to look only.");
  const path = `/tables/${found.table_id}`;
  const name = found.registration.table;
  const act = (title, text, verb, work, done) => async () => {
    if (!(await confirm(title, text, verb))) return;
    try { await work(); tell(done); } catch (failure) { tell([failure.message, failure.hint].filter(Boolean).join(" "), true); }
    again();
  };
  return h("div", { class: "row", role: "group", "aria-label": "Actions" },
    found.pause
      ? h("button", { type: "button", onclick: act(`Resume ${name}?`, "The next round takes the table up again.", "Resume", () => send("POST", `${path}/resume`), "The table goes on.") }, "Resume")
      : h("button", { type: "button", onclick: act(`Pause ${name}?`, "Nothing is done to the table until it is resumed. What runs now ends first.", "Pause", () => send("POST", `${path}/pause`, { reason: "from the console" }), "The table is held back.") }, "Pause"),
    h("button", { type: "button", onclick: act(`Maintain ${name} now?`, "Deletes are applied, small files merged, manifests rewritten, old snapshots expired and orphans removed, as the policy says.", "Maintain", () => send("POST", `${path}/maintenance`), "Asked for; the leader begins with its next round.") }, "Maintain now"),
    found.registration.frozen
      ? h("button", { type: "button", class: "risky", onclick: act(`Accept the foreign change of ${name}?`, "Somebody else has changed rows of the lake table. Accepting publishes what is there now.", "Accept", () => send("POST", `${path}/accept`), "Publication goes on.") }, "Accept foreign change")
      : null,
    found.pause ? h("span", { class: "soft" }, `paused ${ago(found.pause.paused_at)} by ${found.pause.paused_by}${found.pause.reason ? `: ${found.pause.reason}` : ""}`) : null);
}

function policy(found, { who, again }) {
  const path = `/tables/${found.table_id}/policy`;
  const change = async (body, words) => {
    try { await send("PATCH", path, body); tell(words); } catch (failure) { tell([failure.message, failure.hint].filter(Boolean).join(" "), true); }
    again();
  };
  const edit = async (happened) => {
    happened.preventDefault();
    const given = new FormData(happened.target);
    const key = given.get("key"), value = String(given.get("value")).trim();
    if (!value || !(await confirm(`Set ${key}?`, `${key} = ${value} for ${found.registration.table}, from the next pass on.`, "Set"))) return;
    await change({ set: { [key]: value } }, `${key} is ${value} now.`);
    happened.target.reset();
  };
  const reset = (key) => async () => {
    if (await confirm(`Back to the default of ${key}?`, `${found.registration.table} follows the worker's own setting again, from the next pass on.`, "Back to default")) await change({ unset: [key] }, `${key} follows the default again.`);
  };
  const written = (one) => (one.value === "" || one.value === null ? nothing : String(one.value));
  // Whoever edits a value begins with the one in force.
  const offer = (happened) => { happened.target.form.elements.value.value = found.policy.find((one) => one.key === happened.target.value)?.value ?? ""; };
  return [
    grid("Where a value comes from stands beside it.", [
      { title: "Key", code: true, cell: (one) => one.key }, { title: "Value", code: true, cell: written },
      { title: "From", cell: (one) => badge(one.source, one.source === "table" ? "good" : null) },
      { title: "", cell: (one) => (one.source === "table" && who.scope !== "read" ? h("button", { type: "button", class: "quiet", "aria-label": `Back to the default of ${one.key}`, onclick: reset(one.key) }, "Back to default") : "") },
    ], found.policy, "The defaults apply."),
    who.scope === "read" || !found.policy.length ? null : h("form", { class: "row", onsubmit: edit, "data-keep": "policy" },
      h("label", { for: "policy-key" }, "Key"), h("select", { id: "policy-key", name: "key", onchange: offer }, found.policy.map((one) => h("option", { value: one.key }, one.key))),
      h("label", { for: "policy-value" }, "Value"), h("input", { id: "policy-value", name: "value", required: true, autocomplete: "off", placeholder: "new value" }),
      h("button", {}, "Set")),
  ];
}
