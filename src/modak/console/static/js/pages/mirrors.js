// Mirrored tables: how far behind the heap the lake is, and how much WAL waits for them.

import { badge, grid, h, sheet } from "../dom.js";
import { lines } from "../charts.js";
import { get } from "../api.js";
import { ago, bytes, count, nothing, seconds } from "../format.js";

const MOST = 6;
export const drawn = (series) => series.map((one) => ({ name: one.name, points: one.points.filter(([, value]) => value !== null).map(([when, value]) => [when * 1000, value]) })).filter((one) => one.points.length);

export const mirrors = {
  title: "Mirrors",
  every: 5,
  load: async () => {
    const [overview, lag, retained] = await Promise.all([get("/overview?limit=1000&mode=mirrored"), get(`/series?metric=mirror_lag_bytes&most=${MOST}`), get(`/series?metric=slot_retained_wal_bytes&most=${MOST}`)]);
    return { tables: overview.tables, lag, retained };
  },
  draw(found) {
    const largest = found.tables.length > MOST ? `The ${MOST} largest of ${count(found.tables.length)}.` : null;
    return [
      h("h1", {}, "Mirrors"),
      h("p", { class: "lead" }, "Changes are read from the WAL, folded and committed to the lake; then the slot moves on."),
      sheet("Mirrored tables", grid("Lag: WAL that is not in the lake yet, and since when.", COLUMNS, found.tables,
        ["No table is mirrored. Try ", h("code", {}, "modak-worker register --mode mirrored --table public.orders --pk id --tier-key id")])),
      found.tables.length ? h("div", { class: "grid" },
        sheet("Lag over the last hour", lines(drawn(found.lag), "bytes", "Lag"), largest ? h("p", { class: "soft" }, largest) : null),
        sheet("WAL retained by slots", lines(drawn(found.retained), "bytes", "WAL retained"), largest ? h("p", { class: "soft" }, largest) : null)) : null,
    ];
  },
};

const COLUMNS = [
  { title: "Table", long: true, cell: (one) => h("a", { href: `#/table/${one.table_id}` }, one.table) },
  { title: "State", cell: state },
  { title: "Frontier", code: true, extra: true, cell: (one) => one.mirror_frontier ?? nothing },
  { title: "Lag", number: true, cell: (one) => bytes(one.mirror_lag_bytes) },
  { title: "Behind", number: true, cell: (one) => seconds(one.mirror_lag_seconds) },
  { title: "Last commit", cell: (one) => ago(one.cutline_updated_at) },
  { title: "Lake rows", number: true, extra: true, cell: (one) => count(one.lake?.records) },
  { title: "Error", long: true, cell: (one) => (one.mirror_error ?? one.last_error ? h("span", { class: "bad" }, one.mirror_error ?? one.last_error) : "") },
];

function state(one) {
  if (one.paused_at) return badge("paused", "warn");
  if (one.mirror_error || one.last_error) return h("span", { title: one.mirror_failing_since ? `since ${one.mirror_failing_since}` : null }, badge("failing", "bad"));
  if (one.copying) return badge("copying");
  return one.mirror_frontier ? badge("following", "good") : badge("not copied yet", "warn");
}
