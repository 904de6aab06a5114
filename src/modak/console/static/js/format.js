// Numbers and times as people read them.

const WHOLE = new Intl.NumberFormat("en-US");
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export const nothing = "–";
const absent = (value) => value === null || value === undefined || Number.isNaN(value);

export const count = (value) => (absent(value) ? nothing : typeof value === "number" ? WHOLE.format(value) : String(value));

/** So many of something: `1 row`, `1,200 rows`. */
export const many = (value, noun) => `${count(value)} ${noun}${Number(value) === 1 ? "" : "s"}`;

export function bytes(value) {
  if (absent(value)) return nothing;
  let size = Number(value), at = 0;
  while (Math.abs(size) >= 1024 && at < SIZES.length - 1) { size /= 1024; at += 1; }
  return `${at === 0 || size >= 100 ? Math.round(size) : size.toFixed(1)} ${SIZES[at]}`;
}

export function seconds(value) {
  if (absent(value)) return nothing;
  const all = Number(value);
  if (all < 1) return `${Math.round(all * 1000)} ms`;
  if (all < 90) return `${all < 10 ? all.toFixed(1) : Math.round(all)} s`;
  if (all < 5400) return `${Math.round(all / 60)} min`;
  if (all < 172800) return `${(all / 3600).toFixed(1)} h`;
  return `${Math.round(all / 86400)} d`;
}

export function ago(moment) {
  if (!moment) return nothing;
  const passed = (Date.now() - Date.parse(moment)) / 1000;
  return passed < 0 ? `in ${seconds(-passed)}` : `${seconds(passed)} ago`;
}

export const at = (moment) => (moment ? new Date(moment).toISOString().replace("T", " ").slice(0, 19) + " UTC" : nothing);
export const share = (value) => (absent(value) ? nothing : `${(Number(value) * 100).toFixed(1)} %`);
