// The daemon's API from the browser: the session's cookie goes along by itself, the token against forged requests by hand.

export class Failure extends Error {
  constructor(status, body) {
    super(body?.message ?? `HTTP ${status}`);
    this.status = status;
    this.code = body?.code ?? null;
    this.hint = body?.hint ?? null;
  }
}

let guard = null;

/** Who is signed in, and what this daemon serves: {signed_in, scope, needs_login, sql, stores, csrf}. */
export async function session() {
  const found = await call("GET", "/console/session");
  guard = found.csrf;
  return found;
}

export async function signIn(token) {
  const found = await call("POST", "/console/session", { token });
  guard = found.csrf;
  return found;
}

export const signOut = () => call("DELETE", "/console/session");
export const get = (path) => call("GET", `/api/v1${path}`);
export const send = (method, path, body) => call(method, `/api/v1${path}`, body);

// Snapshot ids and tier keys have 64 bits, a number here 53: what does not fit stays text.
function exact(_key, value, context) {
  return typeof value === "number" && Number.isInteger(value) && !Number.isSafeInteger(value) && context?.source ? context.source : value;
}

async function call(method, path, body) {
  const headers = { Accept: "application/json" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (method !== "GET" && guard) headers["X-Modak-Csrf"] = guard;
  const answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body), credentials: "same-origin", cache: "no-store" });
  const text = await answer.text();
  let read = null;
  if (text) { try { read = JSON.parse(text, exact); } catch { read = { message: text.slice(0, 300) }; } }
  if (!answer.ok) throw new Failure(answer.status, read?.error ?? read);
  return read;
}
