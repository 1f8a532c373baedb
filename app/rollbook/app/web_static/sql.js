// Questions in SQL: those that come ready made, and one's own, as a table and a simple chart.
import { html, useEffect, useMemo, useState } from "./vendor/vendor.js";
import { Chart } from "./chart.js";
import { Problem, address, ask, go, number, time, useAnswer, useTitle } from "./core.js";

const FIRST = "select run_id, version, count(*) as episodes, avg(reward) as reward\nfrom episodes group by all order by all";
const AT_ONCE = 200;

export function Sql({ params }) {
  useTitle("SQL");
  const book = useAnswer("book", {}, { isLive: false });
  const runs = useAnswer("runs");
  const [typed, setTyped] = useState(params.q ?? FIRST);
  const [told, setTold] = useState({});
  const question = book.data?.questions.find((one) => one.name === params.question);
  const asked = JSON.stringify([params.q, params.question, params.run]);

  useEffect(() => {
    if (params.q !== undefined) setTyped(params.q);
    if (!params.q && !params.question) return undefined;
    const leaving = new AbortController();
    setTold((old) => ({ ...old, isAsking: true }));
    (params.question
      ? ask(`canned/${encodeURIComponent(params.question)}`, { run: params.run }, { signal: leaving.signal })
      : ask("sql", {}, { body: { query: params.q }, signal: leaving.signal })
    ).then(
      (data) => setTold({ data, asked }),
      (error) => error.name !== "AbortError" && setTold({ error, asked }),
    );
    return () => leaving.abort();
  }, [asked]);

  const run = () => {
    const to = address(["sql"], { q: typed });
    if (location.hash === to) {
      setTold({ isAsking: true });
      ask("sql", {}, { body: { query: typed } }).then((data) => setTold({ data, asked }), (error) => setTold({ error, asked }));
    } else go(to);
  };
  return html`
    <h1>SQL</h1>
    <div class="toolbar">
      <label>A question <select value=${params.question ?? ""} onChange=${(event) => event.target.value && go(address(["sql"], { question: event.target.value, run: params.run }))}>
        <option value="" selected=${!params.question}>of your own</option>
        ${(book.data?.questions ?? []).map((one) => html`<option value=${one.name} selected=${one.name === params.question}>${one.name}</option>`)}
      </select></label>
      ${question && html`<label>of <select value=${params.run ?? ""} onChange=${(event) => go(address(["sql"], { question: question.name, run: event.target.value }))}>
        <option value="" selected=${!params.run}>all runs</option>
        ${(runs.data ?? []).map((one) => html`<option value=${one.run_id} selected=${one.run_id === params.run}>${one.run_id}</option>`)}
      </select></label>`}
    </div>
    ${question && html`<p>${question.help}</p><details class="raw"><summary>Its SQL</summary><div class="said">${question.sql}</div></details>`}
    <form onSubmit=${(event) => {
      event.preventDefault();
      run();
    }}>
      <label class="block" for="query">One SELECT on the book's tables</label>
      <textarea id="query" rows="5" spellcheck=${false} autocapitalize="off" value=${typed} onInput=${(event) => setTyped(event.target.value)}
        onKeyDown=${(event) => {
          if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
            event.preventDefault();
            run();
          }
        }}></textarea>
      <p class="toolbar"><button type="submit" class="main" disabled=${told.isAsking}>Run</button> <span class="quiet keys"><kbd>Ctrl</kbd> <kbd>Enter</kbd></span></p>
    </form>
    <div aria-live="polite">
      ${told.isAsking && html`<p class="quiet">Asking…</p>`}
      ${told.error && html`<${Problem} error=${told.error} />`}
      ${told.data && html`<${Answer} key=${told.asked} table=${told.data} />`}
    </div>
    <details class="raw"><summary>The tables</summary>
      ${(book.data?.tables ?? []).map(
        (table) => html`<details><summary><code>${table.name}</code> ${table.help}</summary>
          <dl class="columns-help">${table.columns.map((column) => html`<dt><code>${column.name}</code></dt><dd>${column.help}</dd>`)}</dl></details>`,
      )}
    </details>
  `;
}

const cell = (value, kind) => {
  if (value === null || value === undefined) return html`<span class="quiet">null</span>`;
  if (kind === "number") return number(value, 5);
  if (kind === "time") return time(value);
  return typeof value === "string" ? value : JSON.stringify(value);
};

function Cell({ value, name, kind }) {
  if (name === "episode_id" && value) return html`<a href=${address(["episode", value])}>${value}</a>`;
  if (name === "run_id" && value) return html`<a href=${address(["run", value])}>${value}</a>`;
  return cell(value, kind);
}

function Answer({ table }) {
  const [page, setPage] = useState(0);
  const rows = table.rows.slice(page * AT_ONCE, (page + 1) * AT_ONCE);
  return html`
    <${Picture} table=${table} />
    <p class="quiet">${number(table.rows.length)} rows${table.seconds === undefined ? "" : ` in ${number(table.seconds * 1000, 0)} ms`}</p>
    <div class="scroll" tabindex="0" role="region" aria-label="answer">
      <table class="list">
        <thead><tr>${table.columns.map((column) => html`<th scope="col" class=${column.kind === "number" ? "num" : ""}>${column.name}</th>`)}</tr></thead>
        <tbody>${rows.map(
          (row) => html`<tr>${row.map(
            (value, i) => html`<td class=${table.columns[i].kind === "number" ? "num" : "clip"}><${Cell} value=${value} name=${table.columns[i].name} kind=${table.columns[i].kind} /></td>`,
          )}</tr>`,
        )}</tbody>
      </table>
    </div>
    ${
      table.rows.length > AT_ONCE &&
      html`<nav class="pager" aria-label="pages of the answer">
        <button disabled=${page === 0} onClick=${() => setPage(page - 1)}>Previous</button>
        <span>${number(page * AT_ONCE + 1)}–${number(page * AT_ONCE + rows.length)} of ${number(table.rows.length)}</span>
        <button disabled=${(page + 1) * AT_ONCE >= table.rows.length} onClick=${() => setPage(page + 1)}>Next</button>
      </nav>`
    }
  `;
}

// Any number over any other; lines are told apart by a column of text.
function Picture({ table }) {
  const numbers = table.columns.map((column, i) => [column, i]).filter(([column]) => column.kind === "number").map(([, i]) => i);
  const texts = table.columns.map((column, i) => [column, i]).filter(([column]) => column.kind === "text").map(([, i]) => i);
  const guess = numbers.find((i) => /version|step|^k$|turns|staleness|n_interactions/.test(table.columns[i].name)) ?? numbers[0];
  const [x, setX] = useState(guess);
  const [y, setY] = useState(numbers.find((i) => i !== guess && /reward_mean|pass|rate|mean|reward$/.test(table.columns[i].name)) ?? numbers.find((i) => i !== guess));
  const [by, setBy] = useState(texts.find((i) => new Set(table.rows.map((row) => row[i])).size > 1) ?? -1);
  const [kind, setKind] = useState("line");
  const lines = useMemo(() => {
    if (x === undefined || y === undefined) return [];
    const found = new Map();
    for (const row of table.rows) {
      if (typeof row[x] !== "number" || typeof row[y] !== "number") continue;
      const label = by < 0 ? table.columns[y].name : String(row[by]);
      if (!found.has(label)) found.set(label, new Map());
      found.get(label).set(row[x], row[y]);
    }
    return [...found].slice(0, 6).map(([label, points]) => ({ label, points: [...points].map(([px, py]) => ({ x: px, y: py })).sort((a, b) => a.x - b.x) }));
  }, [table, x, y, by]);
  if (numbers.length < 2 || table.rows.length < 2) return null;
  const choice = (label, value, set, of) => html`<label>${label} <select value=${value} onChange=${(event) => set(Number(event.target.value))}>
    ${of.map((i) => html`<option value=${i} selected=${i === value}>${i < 0 ? "nothing" : table.columns[i].name}</option>`)}</select></label>`;
  return html`
    <section class="card">
      <div class="toolbar">
        ${choice("Chart", y, setY, numbers)} ${choice("over", x, setX, numbers)} ${texts.length > 0 && choice("by", by, setBy, [-1, ...texts])}
        <label>as <select value=${kind} onChange=${(event) => setKind(event.target.value)}><option value="line">lines</option><option value="bars">bars</option></select></label>
      </div>
      ${lines.length > 0 && html`<${Chart} lines=${kind === "bars" ? lines.slice(0, 1) : lines} x=${table.columns[x].name} y=${table.columns[y].name} height=${220} kind=${kind} />`}
    </section>
  `;
}
