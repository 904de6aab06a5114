// Mirrored tables: how far behind the heap the lake is, and how much WAL waits for them.

import { badge, grid, h, sheet } from "../dom.js";
import { lines } from "../charts.js";
import { get } from "../api.js";
import { ago, bytes, count, nothing } from "../format.js";

const drawn = (series) => series.map((one) => ({ name: one.name, points: one.points.filter(([, value]) => value !== null).map(([when, value]) => [when * 1000, value]) })).filter((one) => one.points.length);
const last = (series, name) => series.find((one) => one.name === name)?.points.filter(([, value]) => value !== null).at(-1)?.[1];

export const mirrors = {
  title: "Mirrors",
  every: 5,
  load: async () => {
    const [overview, lag, retained] = await Promise.all([get("/overview?limit=1000"), get("/series?metric=mirror_lag_bytes"), get("/series?metric=slot_retained_wal_bytes")]);
    return { tables: overview.tables.filter((one) => one.mode === "mirrored"), lag, retained };
  },
  draw(found) {
    return [
      h("h1", {}, "Mirrors"),
      h("p", { class: "lead" }, "Changes are read from the WAL, folded and committed to the lake; then the slot moves on."),
      sheet("Mirrored tables", grid("Lag is WAL that is not in the lake yet.", [
        { title: "Table", cell: (one) => h("a", { href: `#/table/${one.table_id}` }, one.table) },
        { title: "State", cell: (one) => (one.last_error ? badge("failing", "bad") : one.copying ? badge("copying") : one.mirror_frontier ? badge("following", "good") : badge("not copied yet", "warn")) },
        { title: "Frontier", code: true, cell: (one) => one.mirror_frontier ?? nothing },
        { title: "Lag", number: true, cell: (one) => bytes(last(found.lag, one.table)) },
        { title: "Last commit", cell: (one) => ago(one.cutline_updated_at) },
        { title: "Lake rows", number: true, extra: true, cell: (one) => count(one.lake?.records) },
        { title: "Error", cell: (one) => (one.last_error ? h("span", { class: "bad" }, one.last_error) : "") },
      ], found.tables, "No table is mirrored. Try: modak-worker register --mode mirrored --table public.orders --pk id --tier-key id")),
      h("div", { class: "grid" },
        sheet("Lag over the last hour", lines(drawn(found.lag), "bytes", "Lag")),
        sheet("WAL retained by slots", lines(drawn(found.retained), "bytes", "WAL retained"))),
    ];
  },
};
