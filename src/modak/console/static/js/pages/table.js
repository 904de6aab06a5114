// One table in full: its partitions along the tier key, files, snapshots and pins, policy, and what an operator can do.

import { badge, confirm, facts, grid, h, sheet, tell } from "../dom.js";
import { axisOf, columns, timeline } from "../charts.js";
import { get, send } from "../api.js";
import { ago, bytes, count, nothing } from "../format.js";
import { operationColumns } from "./operations.js";

export const table = {
  title: "Table",
  every: 4,
  async load(argument) {
    const base = `/tables/${encodeURIComponent(argument)}`;
    const [found, files, snapshots] = await Promise.all([get(base), get(`${base}/files`), get(`${base}/snapshots`)]);
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
        ["Cut-line T", status?.cut_line ?? nothing], ["Highest key", status?.high_water ?? nothing], ["Retention line R", status?.retention_line ?? nothing],
        ["Lag", status?.lag ?? nothing], ["Heap", bytes(status?.heap_bytes)], ["Lake", bytes(status?.lake_bytes)],
        ["Lake rows", count(status?.lake_rows)], ["Corrections waiting", count(status?.delta_backlog)], ["Readers' pins", count(status?.pins)],
        cutline.frontier ? ["Frontier F", cutline.frontier] : null,
      ]),
      sheet("Partitions along the tier key", axisOf(found.partitions, cutline.t, cutline.retention_line), partitions(found.partitions)),
      h("div", { class: "grid" },
        sheet("Files by size", columns(classes(found.files), "Data files by size"), h("p", { class: "soft" }, `${count(found.files.files_with_deletes)} files carry deletes.`)),
        sheet("Snapshots and pins", timeline(moments(found.snapshots), found.snapshots.pins.map((pin) => ({ since: pin.created_at, holder: pin.holder }))), pins(found.pins))),
      sheet("Policy in force", policy(found, tools)),
      sheet("Last operations", grid("Newest first.", operationColumns(false), found.operations, "Nothing has been done to this table yet.")),
    ];
  },
};

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
  return h("details", {}, h("summary", {}, `${living.length} partitions in Postgres`), grid("In the order of the tier key.", [
    { title: "Partition", code: true, cell: (one) => one.name }, { title: "From", number: true, cell: (one) => one.lower ?? "MINVALUE" },
    { title: "To", number: true, cell: (one) => one.upper ?? "MAXVALUE" }, { title: "State", cell: (one) => badge(one.state, one.problem ? "warn" : null) },
    { title: "Problem", cell: (one) => one.problem ?? "" },
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
  return [
    grid("Where a value comes from stands beside it.", [
      { title: "Key", code: true, cell: (one) => one.key }, { title: "Value", code: true, cell: (one) => String(one.value) },
      { title: "From", cell: (one) => badge(one.source, one.source === "table" ? "good" : null) },
      { title: "", cell: (one) => (one.source === "table" && who.scope !== "read" ? h("button", { type: "button", class: "quiet", "aria-label": `Back to the default of ${one.key}`, onclick: () => change({ unset: [one.key] }, `${one.key} follows the default again.`) }, "Back to default") : "") },
    ], found.policy, "The defaults apply."),
    who.scope === "read" || !found.policy.length ? null : h("form", { class: "row", onsubmit: edit, "data-keep": "policy" },
      h("label", { for: "policy-key" }, "Key"), h("select", { id: "policy-key", name: "key" }, found.policy.map((one) => h("option", { value: one.key }, one.key))),
      h("label", { for: "policy-value" }, "Value"), h("input", { id: "policy-value", name: "value", required: true }),
      h("button", {}, "Set")),
  ];
}
