// What every part of the page stands on: the key, questions to the server, addresses, and how values read.
// Nothing here or elsewhere makes HTML out of data: text is set as text.
import { html, useEffect, useRef, useState } from "./vendor/vendor.js";

// ---- The key. It comes in the fragment, which no server sees, and stays in this tab; other tabs may ask for it.

const KEY = "rollbook-key";
const tabs = new BroadcastChannel("rollbook");
tabs.onmessage = ({ data }) => {
  if (data === "wanted" && key()) tabs.postMessage({ key: key() });
};

export const key = () => sessionStorage.getItem(KEY);

export function keep(value) {
  sessionStorage.setItem(KEY, value);
}

export function takeKeyFromAddress() {
  const found = /^#key=(.+)$/.exec(location.hash);
  if (found) {
    keep(decodeURIComponent(found[1]));
    history.replaceState(null, "", `${location.pathname}#/`);
  }
}

export function askOtherTabs() {
  return new Promise((resolve) => {
    const own = new BroadcastChannel("rollbook");
    const end = () => {
      own.close();
      resolve();
    };
    own.onmessage = ({ data }) => {
      if (data?.key && !key()) {
        keep(data.key);
        end();
      }
    };
    own.postMessage("wanted");
    setTimeout(end, 200);
  });
}

// ---- Questions

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, params = {}, { body, signal } = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given).toString();
  const response = await fetch(`/ui/api/${path}${query ? `?${query}` : ""}`, {
    method: body ? "POST" : "GET",
    body: body && JSON.stringify(body),
    headers: { authorization: `Bearer ${key() ?? ""}` },
    signal,
  }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "the server does not answer; is it still running?");
  });
  const told = await response.json().catch(() => null);
  if (!response.ok) throw new Refused(response.status, told?.error?.message ?? `the server answered ${response.status}`);
  return told;
}

// ---- The book's clock: `stamp` rises with every event, and whoever looks at the book asks again.

const listeners = new Set();
let stamp = null;

export async function watchBook(onRefused) {
  for (;;) {
    if (document.visibilityState === "visible") {
      try {
        const now = (await ask("stamp")).stamp;
        if (stamp !== null && now !== stamp) for (const listener of listeners) listener(now);
        stamp = now;
        onRefused(null);
      } catch (error) {
        onRefused(error);
        if (error.status === 401 || error.status === 403) return;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, 3000));
  }
}

function useStamp() {
  const [now, setNow] = useState(0);
  useEffect(() => {
    listeners.add(setNow);
    return () => listeners.delete(setNow);
  }, []);
  return now;
}

// The answer to a question, asked again when the book grows; the old answer stays until the new one is there.
export function useAnswer(path, params = {}, { isLive = true } = {}) {
  const question = `${path}?${JSON.stringify(params)}`;
  const [told, setTold] = useState({ question: null, data: null, error: null });
  const now = useStamp();
  useEffect(() => {
    const leaving = new AbortController();
    ask(path, params, { signal: leaving.signal }).then(
      (data) => setTold({ question, data, error: null }),
      (error) => error.name !== "AbortError" && setTold({ question, data: null, error }),
    );
    return () => leaving.abort();
  }, [question, isLive ? now : 0]);
  const isStale = told.question !== question;
  return { data: told.data, error: isStale ? null : told.error, isStale };
}

// ---- Addresses: #/run/NAME/episodes?where=...

export function address(parts, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const query = new URLSearchParams(given).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;
}

function readAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const decode = (part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  };
  return { parts: path.split("/").filter(Boolean).map(decode), params: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

export function useAddress() {
  const [where, setWhere] = useState(readAddress);
  useEffect(() => {
    const move = () => setWhere(readAddress());
    addEventListener("hashchange", move);
    return () => removeEventListener("hashchange", move);
  }, []);
  return where;
}

export const go = (to) => {
  location.hash = to;
};

// ---- How values read

export const number = (value, digits = 3) => {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6 ? String(Number(value.toFixed(digits))) : value.toExponential(2);
};

export const compact = (value) =>
  value === null || value === undefined ? "–" : Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 }).format(value);

export const time = (value) => {
  if (!value) return "–";
  const at = new Date(value);
  const two = (n) => String(n).padStart(2, "0");
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
};

export const shortId = (id) => (id && id.length > 22 ? `${id.slice(0, 8)}…${id.slice(-6)}` : id);

export const versions = (row) =>
  row.version_min === null || row.version_min === undefined
    ? "–"
    : row.version_min === row.version_max
      ? `v${row.version_min}`
      : `v${row.version_min}–${row.version_max}`;

export function Problem({ error }) {
  return error ? html`<p class="problem" role="alert">${error.message}</p>` : null;
}

export function Waiting({ of }) {
  return of.error ? html`<${Problem} error=${of.error} />` : html`<p class="quiet" role="status">Reading the book…</p>`;
}

export const State = ({ state }) => html`<span class=${`badge state-${state}`}>${state}</span>`;

export function useTitle(title) {
  useEffect(() => {
    document.title = `${title} · Rollbook`;
  }, [title]);
}

// Keys that a page answers to, unless something is being typed.
export function useKeys(keys) {
  const latest = useRef(keys);
  latest.current = keys;
  useEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
      if (latest.current[event.key]) {
        event.preventDefault();
        latest.current[event.key]();
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}
