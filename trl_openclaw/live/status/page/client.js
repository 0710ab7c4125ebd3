// What the page asks the gateway. Where keys are configured, the key lives in sessionStorage and goes out as a header.

const KEY = "trl-openclaw-key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const hasKey = () => sessionStorage.getItem(KEY) !== null;
export const setKey = (key) => sessionStorage.setItem(KEY, key);
export const forgetKey = () => sessionStorage.removeItem(KEY);

/** A part of the page's data; `undefined` where `etag` is still the state of things. */
export async function get(path, parameters = {}, etag = null) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== null));
  const response = await send(`status/${path}${query.size ? `?${query}` : ""}`, {
    headers: etag ? { "If-None-Match": etag } : {},
  });
  if (response.status === 304) return undefined;
  const data = await response.json();
  data.etag = response.headers.get("ETag");
  return data;
}

/** Have the gateway change something. */
export async function post(path, body) {
  const response = await send(`status/${path}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  return response.json();
}

async function send(path, options) {
  const headers = new Headers(options.headers);
  if (hasKey()) headers.set("Authorization", `Bearer ${sessionStorage.getItem(KEY)}`);
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (!response.ok && response.status !== 304) throw new Refused(response.status, await reason(response));
  return response;
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}
