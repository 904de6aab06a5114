// Entity stores: what waits in Postgres, what lies in base and delta files.

import { facts, grid, h, sheet } from "../dom.js";
import { columns, lines } from "../charts.js";
import { get } from "../api.js";
import { bytes, count, many, seconds } from "../format.js";
import { drawn } from "./mirrors.js";

const MOST = 6;

/** The schemas with most of something, as columns. */
const largest = (schemas, name, empty) => columns([...schemas].sort((one, other) => other[name] - one[name]).slice(0, 6).map((one) => [one.name, one[name]]), `${name.replace("_", " ")} by schema`, empty);

export const entities = {
  title: "Entities",
  every: 10,
  load: async (_argument, _query, who) => {
    if (!who.stores.entities) return { off: true };
    const [schemas, waiting, size] = await Promise.all([get("/entities/status"), get(`/series?metric=entities_dirty&most=${MOST}`), get(`/series?metric=entities_bytes&most=${MOST}`)]);
    return { schemas, waiting, size };
  },
  draw(found) {
    const lead = h("p", { class: "lead" }, "Changed entities are flushed into delta files; compaction folds them into the base.");
    if (found.off) return [h("h1", {}, "Entities"), lead, h("section", { class: "sheet" }, h("p", { class: "empty" }, "No entity store is served. Set ", h("code", {}, "MODAK_ENTITIES_ENABLED=true"), ", then start the worker again."))];
    const all = (name) => found.schemas.reduce((sum, one) => sum + Number(one[name] ?? 0), 0);
    return [
      h("h1", {}, "Entities"), lead,
      facts([["Schemas", count(found.schemas.length)], ["Rows waiting", count(all("dirty"))], ["Quarantined", count(all("quarantined")), all("quarantined") ? "warn" : "good"], ["Base", bytes(all("base_bytes"))], ["Delta", bytes(all("delta_bytes"))]]),
      found.schemas.length ? h("div", { class: "grid" },
        sheet("Rows in base files", largest(found.schemas, "base_rows", "Nothing in base files yet.")),
        sheet("Rows in delta files", largest(found.schemas, "delta_rows", "Everything is in the base.")),
        sheet("Changes waiting over the last hour", lines(drawn(found.waiting), "count", "Changes waiting")),
        sheet("Size over the last hour", lines(drawn(found.size), "bytes", "Size"))) : null,
      sheet("Schemas", grid("One row a schema.", [
        { title: "Schema", cell: (one) => `${one.name} (${one.schema_id})` },
        { title: "Waiting", number: true, cell: (one) => count(one.dirty) }, { title: "Oldest", number: true, cell: (one) => seconds(one.oldest_seconds) },
        { title: "Quarantined", number: true, cell: (one) => (one.quarantined ? h("span", { class: "warn" }, count(one.quarantined)) : "0") },
        { title: "Base", number: true, cell: (one) => `${many(one.base_rows, "row")}, ${many(one.base_files, "file")}` },
        { title: "Delta", number: true, cell: (one) => `${many(one.delta_rows, "row")}, ${many(one.delta_files, "file")}` },
        { title: "Compaction", extra: true, cell: (one) => one.compaction },
      ], found.schemas, "No schema has any rows yet.")),
    ];
  },
};
