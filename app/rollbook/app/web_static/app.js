// The page: who may look, where one is, and what is shown there.
import { Component, html, render, useEffect, useState } from "./vendor/vendor.js";
import { address, ask, askOtherTabs, keep, key, takeKeyFromAddress, useAddress, watchBook } from "./core.js";
import { EpisodePage, GroupPage } from "./episode.js";
import { Overview } from "./overview.js";
import { Run } from "./run.js";
import { Sql } from "./sql.js";

function Shown({ parts, params }) {
  const [kind, ...rest] = parts;
  if (kind === undefined) return html`<${Overview} />`;
  if (kind === "run" && rest[0]) return html`<${Run} run=${rest[0]} tab=${rest[1]} params=${params} />`;
  if (kind === "group" && rest[1]) return html`<${GroupPage} key=${parts.join("/")} run=${rest[0]} group=${rest[1]} params=${params} />`;
  if (kind === "episode" && rest[0]) return html`<${EpisodePage} key=${rest[0]} id=${rest[0]} params=${params} />`;
  if (kind === "sql") return html`<${Sql} params=${params} />`;
  return html`<p class="problem" role="alert">There is nothing at this address. <a href="#/">All runs</a></p>`;
}

// A fault of the page itself is said, not swallowed; another address begins anew.
class Boundary extends Component {
  constructor() {
    super();
    this.state = { error: null };
  }

  componentDidCatch(error) {
    this.setState({ error });
    throw error;
  }

  render({ children }, { error }) {
    return error ? html`<p class="problem" role="alert">This page failed: ${error.message}</p>` : children;
  }
}

function Ask({ error, onKey }) {
  const [typed, setTyped] = useState("");
  return html`
    <form class="card ask" onSubmit=${(event) => {
      event.preventDefault();
      onKey(typed.trim());
    }}>
      <h1>This book needs its key</h1>
      <p>Open the address that <code>rollbook view</code> printed, or enter the admin key of <code>rollbook serve</code>.</p>
      ${error && key() && html`<p class="problem" role="alert">${error.message}</p>`}
      <label class="block">Key <input type="password" value=${typed} autocomplete="off" onInput=${(event) => setTyped(event.target.value)} /></label>
      <button type="submit" class="main">Open</button>
    </form>
  `;
}

function App() {
  const where = useAddress();
  const [book, setBook] = useState(null);
  const [error, setError] = useState(null);
  const [tries, setTries] = useState(0);
  useEffect(() => {
    ask("book").then((told) => {
      setBook(told);
      setError(null);
      watchBook(setError);
    }, setError);
  }, [tries]);
  const isRefused = error && (error.status === 401 || error.status === 403);
  return html`
    <a class="skip" href="#main" onClick=${(event) => {
      event.preventDefault();
      document.getElementById("main").focus();
    }}>To the content</a>
    <header class="top">
      <a class="brand" href="#/">Rollbook</a>
      <nav aria-label="pages">
        <a href="#/" aria-current=${where.parts.length === 0 ? "page" : undefined}>Runs</a>
        <a href=${address(["sql"])} aria-current=${where.parts[0] === "sql" ? "page" : undefined}>SQL</a>
      </nav>
      <span class="book" title=${book?.name}>${book?.name.split("/").slice(-2).join("/")}</span>
      ${book && html`<span class=${`live${error ? " is-off" : ""}`} title=${error ? error.message : "This page follows the book"}>${error ? "not connected" : "live"}</span>`}
    </header>
    <main id="main" tabindex="-1">
      ${
        isRefused
          ? html`<${Ask} error=${error} onKey=${(value) => {
              keep(value);
              setTries(tries + 1);
            }} />`
          : book
            ? html`<${Boundary} key=${where.parts.join("/")}><${Shown} ...${where} /></${Boundary}>`
            : error && html`<p class="problem" role="alert">${error.message}</p>`
      }
    </main>
  `;
}

takeKeyFromAddress();
if (!key()) await askOtherTabs();
render(html`<${App} />`, document.getElementById("app"));
