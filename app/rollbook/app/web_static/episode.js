// An episode as a tree, and a group of episodes side by side.
// A chain of calls stays at one level and only forks indent, so that a hundred turns are readable.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/vendor.js";
import { Problem, State, Waiting, address, ask, go, number, shortId, time, useAnswer, useKeys, useTitle, versions } from "./core.js";

const LONG = 1600; // characters of a message that are shown at first
const MANY = 1500; // tokens that are shown at first
const SIDE_BY_SIDE = 8;

const COLOURINGS = [
  ["probability", "probability"],
  ["credit", "credit"],
  ["version", "policy version"],
  ["none", "no colour"],
];

// ---- What was said

const textOf = (content) => {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return JSON.stringify(content, null, 1);
  return content.map((part) => (typeof part?.text === "string" ? part.text : `[${part?.type ?? typeof part}]`)).join("\n");
};

function Text({ text, className = "" }) {
  const [isWhole, setIsWhole] = useState(false);
  const isLong = text.length > LONG;
  return html`<div class=${`said ${className}`}>${isLong && !isWhole ? `${text.slice(0, LONG)}…` : text}</div>
    ${isLong && html`<button class="more" onClick=${() => setIsWhole(!isWhole)}>${isWhole ? "Show less" : `Show all ${number(text.length)} characters`}</button>`}`;
}

function Call({ call }) {
  const told = call.function ?? call;
  return html`<div class="call"><span class="tool">${told.name ?? "?"}</span><code>${
    typeof told.arguments === "string" ? told.arguments : JSON.stringify(told.arguments ?? told.input ?? null)
  }</code></div>`;
}

export function Message({ message, isReply = false }) {
  const role = String(message.role ?? "?");
  const text = textOf(message.content);
  const reasoning = message.reasoning_content ?? message.reasoning;
  return html`
    <div class=${`message role-${["system", "user", "assistant", "tool", "developer"].includes(role) ? role : "other"}${isReply ? " reply" : ""}`}>
      <span class="role">${role}${message.name ? ` ${message.name}` : ""}</span>
      <div class="body">
        ${reasoning && html`<details class="reasoning" open=${isReply}><summary>Reasoning</summary><${Text} text=${textOf(reasoning)} /></details>`}
        ${text && html`<${Text} text=${text} />`}
        ${(message.tool_calls ?? []).map((call) => html`<${Call} call=${call} />`)}
        ${!text && !reasoning && !(message.tool_calls ?? []).length && html`<span class="quiet">(nothing)</span>`}
      </div>
    </div>
  `;
}

// ---- Tokens

const step = (value, of) => Math.max(0, Math.min(of, Math.round(value * of)));

function classOf(colouring, tokens, i, credit, most) {
  if (colouring === "probability") return `p${step(Math.exp(Math.min(0, tokens.logprobs[i] ?? 0)), 10)}`;
  if (colouring === "version") return `v${(tokens.versions[i] ?? 0) % 8}`;
  if (colouring === "credit" && credit !== null && credit !== undefined) {
    const size = most ? step(Math.abs(credit) / most, 5) : 0;
    return credit < 0 ? `bad${size}` : `good${size}`;
  }
  return "";
}

// A token's text as a person can see it: line ends and parts of characters too.
const shown = (text) => (text === "" ? "·" : text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t"));

function Tokens({ one, colouring, most }) {
  const box = useRef(null);
  const [isNear, setIsNear] = useState(false);
  const [told, setTold] = useState({});
  const [at, setAt] = useState(null);
  const [isAll, setIsAll] = useState(false);
  useEffect(() => {
    const seen = new IntersectionObserver(([entry]) => entry.isIntersecting && setIsNear(true), { rootMargin: "300px" });
    seen.observe(box.current);
    return () => seen.disconnect();
  }, []);
  useEffect(() => {
    if (!isNear) return undefined;
    const leaving = new AbortController();
    ask("tokens", { id: one.interaction_id }, { signal: leaving.signal }).then(
      (data) => setTold({ data }),
      (error) => error.name !== "AbortError" && setTold({ error }),
    );
    return () => leaving.abort();
  }, [isNear, one.interaction_id]);
  const tokens = told.data?.output;
  const n = tokens ? (isAll ? tokens.ids.length : Math.min(MANY, tokens.ids.length)) : 0;
  const point = (event) => {
    const i = event.target.dataset?.i;
    if (i !== undefined) setAt(Number(i));
  };
  return html`
    <div class="tokens-box" ref=${box}>
      ${told.error && html`<${Problem} error=${told.error} />`}
      ${!told.data && !told.error && html`<p class="quiet">${number(one.n_output)} tokens…</p>`}
      ${
        tokens &&
        html`
          <div class=${`tokens${tokens.texts ? "" : " as-numbers"}`} onMouseOver=${point} onClick=${point}>
            ${tokens.ids.slice(0, n).map(
              (id, i) => html`<span class=${`t ${classOf(colouring, tokens, i, one.credit, most)}${i === at ? " at" : ""}`} data-i=${i}>${
                tokens.texts ? shown(tokens.texts[i]) : id
              }</span>`,
            )}
          </div>
          ${n < tokens.ids.length && html`<button class="more" onClick=${() => setIsAll(true)}>Show all ${number(tokens.ids.length)} tokens</button>`}
          <p class="quiet token-facts">${
            at === null
              ? `${number(tokens.ids.length)} tokens${tokens.texts ? "" : ", as numbers: the run's tokenizer is not here"}; point at one`
              : `token ${at + 1} of ${number(tokens.ids.length)}: id ${tokens.ids[at]}, probability ${
                  tokens.logprobs[at] === null ? "–" : number(Math.exp(tokens.logprobs[at]), 4)
                }, logprob ${number(tokens.logprobs[at], 4)}, policy v${tokens.versions[at]}`
          }</p>
          <details class="raw"><summary>Prompt as the model saw it: ${number(told.data.prompt.ids.length)} new tokens of ${number(one.n_prompt)}</summary>
            <div class="said raw-prompt">${told.data.prompt.texts ? told.data.prompt.texts.join("") : told.data.prompt.ids.join(" ")}</div>
          </details>
        `
      }
    </div>
  `;
}

function Legend({ colouring, interactions, most }) {
  const scale = (names, low, high) => html`<span>${low}</span>${names.map((name) => html`<i class=${`t sample ${name}`}></i>`)}<span>${high}</span>`;
  if (colouring === "probability") return html`<p class="legend">${scale([0, 2, 4, 6, 8, 10].map((i) => `p${i}`), "unlikely", "certain")}</p>`;
  if (colouring === "credit")
    return html`<p class="legend">${scale(["bad5", "bad3", "bad1", "good0", "good1", "good3", "good5"], number(-most), `+${number(most)}`)}<span class="quiet">a call's tokens share its credit</span></p>`;
  if (colouring === "version") {
    const low = Math.min(...interactions.map((one) => one.version_min ?? Infinity));
    const high = Math.max(...interactions.map((one) => one.version_max ?? -Infinity));
    if (!Number.isFinite(low)) return null;
    const all = Array.from({ length: Math.min(8, high - low + 1) }, (_, i) => low + i);
    return html`<p class="legend">${all.map((v) => html`<i class=${`t sample v${v % 8}`}></i><span>v${v}</span>`)}${high - low >= 8 && html`<span class="quiet">and so on, round and round</span>`}</p>`;
  }
  return null;
}

// ---- The tree

// Each call with its level: a first child stays beside its parent, every other one goes a level in.
export function layOut(interactions) {
  const children = new Map();
  const level = new Map();
  return interactions.map((one, i) => {
    const n = (children.get(one.parent_id) ?? 0) + 1;
    children.set(one.parent_id, n);
    const above = level.get(one.parent_id) ?? 0;
    const own = one.parent_id === null || n === 1 ? above : above + 1;
    level.set(one.interaction_id, own);
    return { one, i, level: own, isFork: one.parent_id !== null && n > 1, isNewRoot: one.parent_id === null && i > 0 };
  });
}

const brief = (one) => {
  const call = (one.reply?.tool_calls ?? [])[0];
  const text = textOf(one.reply?.content) || (call ? `${(call.function ?? call).name}()` : textOf(one.reply?.reasoning_content));
  return text.slice(0, 80);
};

function Facts({ one }) {
  return html`
    <p class="facts">
      <span>${versions(one)}</span>
      <span>${number(one.n_output)} tokens sampled</span>
      <span>prompt ${number(one.n_prompt)}${one.n_shared ? `, ${number(one.n_shared)} of them the parent's` : ""}</span>
      ${one.finish_reason && html`<span>ended by ${one.finish_reason}</span>`}
      ${one.seconds !== null && html`<span>${number(one.seconds, 2)} s</span>`}
      ${one.role && html`<span>as ${one.role}</span>`}
      <span class="quiet">${one.dialect} · ${one.model}</span>
    </p>
    <p class="badges">
      ${one.edge && one.edge !== "extends" && html`<span class="badge warn">${one.edge}${one.cause ? `: ${one.cause}` : ""}</span>`}
      ${one.is_pruned && html`<span class="badge warn">pruned: its tokens are gone</span>`}
      ${one.is_retried && html`<span class="badge warn">asked again later</span>`}
      ${one.origin_id && html`<span class="badge">from the record</span>`}
      ${!one.is_trainable && html`<span class="badge">not trained on</span>`}
      ${one.capture !== "complete" && html`<span class="badge bad">capture ${one.capture}</span>`}
      ${one.delivered !== null && html`<span class="badge warn">client left after ${number(one.delivered)} tokens</span>`}
      ${one.credit !== null && html`<span class=${`badge ${one.credit > 0 ? "good" : one.credit < 0 ? "bad" : ""}`}>credit ${number(one.credit)}</span>`}
      ${one.rewards.map((reward) => html`<${Reward} reward=${reward} />`)}
      ${one.batches.map((batch) => html`<span class="badge">step ${batch.step}: advantage ${number(batch.advantage)}${batch.is_trained ? "" : " (not trained yet)"}</span>`)}
      ${one.scores.map((score) => html`<span class="badge">${score.scorer}${score.version === null ? "" : ` v${score.version}`}: gap ${number(score.mean_gap, 4)}</span>`)}
    </p>
  `;
}

const Reward = ({ reward }) =>
  html`<span class=${`badge ${reward.value > 0 ? "good" : reward.value < 0 ? "bad" : ""}`}>${reward.name} ${number(reward.value)}${
    reward.weight !== 1 ? ` × ${number(reward.weight)}` : ""
  }${reward.start !== null ? ` on tokens ${reward.start}–${reward.end}` : ""} by ${reward.source}</span>`;

export function EpisodePage({ id, params }) {
  useTitle(shortId(id));
  const answer = useAnswer("episode", { id, scheme: params.scheme });
  const colouring = params.colour ?? "probability";
  const [at, setAt] = useState(null);
  const place = useRef(null); // the same as `at`, but already moved when keys come faster than pictures
  const to = (given) => address(["episode", id], { ...params, ...given });
  const nodes = useMemo(() => (answer.data ? layOut(answer.data.interactions) : []), [answer.data]);
  const selected = at ?? Math.max(0, nodes.findIndex(({ one }) => one.interaction_id === params.call));
  const move = (i) => {
    const next = Math.max(0, Math.min(nodes.length - 1, i));
    place.current = next;
    setAt(next);
    if (nodes[next]) document.getElementById(`call-${next}`)?.scrollIntoView({ block: "start" });
  };
  useKeys({
    j: () => move(place.current === null ? selected : place.current + 1),
    k: () => move((place.current ?? selected) - 1),
    c: () => {
      const names = COLOURINGS.map(([name]) => name);
      go(to({ colour: names[(names.indexOf(colouring) + 1) % names.length] }));
    },
  });
  const isReady = Boolean(answer.data);
  useEffect(() => {
    if (isReady && params.call) document.getElementById(`call-${selected}`)?.scrollIntoView({ block: "start" });
  }, [isReady]);
  if (!answer.data) return html`<${Waiting} of=${answer} />`;
  const { episode, rewards, failures, interactions } = answer.data;
  const most = Math.max(0, ...interactions.map((one) => Math.abs(one.credit ?? 0)));
  return html`
    <p class="crumbs"><a href=${address(["run", episode.run_id])}>${episode.run_id}</a>
      ${episode.group_id && html` › <a href=${address(["group", episode.run_id, episode.group_id])}>${episode.group_id}</a>`}</p>
    <h1 class="name">${id}</h1>
    <p class="badges">
      <${State} state=${episode.state} />
      ${episode.reward !== null && episode.reward !== undefined && html`<span class=${`badge ${episode.reward > 0 ? "good" : episode.reward < 0 ? "bad" : ""}`}>reward ${number(episode.reward)}</span>`}
      ${episode.is_eval && html`<span class="badge">evaluation</span>`}
      ${rewards.map((reward) => html`<${Reward} reward=${reward} />`)}
    </p>
    <p class="facts">
      <span>task ${episode.task_id ?? "–"}</span><span>${versions(episode)}</span><span>${number(interactions.length)} calls</span>
      <span>began ${time(episode.opened_at)}</span>${episode.reason && html`<span>${episode.reason}</span>`}
      ${episode.origin_interaction_id && html`<span>a fork of ${
        episode.origin_episode_id
          ? html`<a href=${address(["episode", episode.origin_episode_id], { call: episode.origin_interaction_id })}>${shortId(episode.origin_interaction_id)}</a>`
          : shortId(episode.origin_interaction_id)
      }</span>`}
    </p>
    ${episode.task && html`<details class="raw"><summary>The task</summary><div class="said">${pretty(episode.task)}</div></details>`}
    ${failures.length > 0 && html`<section class="card failures"><h2>Calls without an answer</h2><ul>${failures.map(
      (failure) => html`<li><b>${failure.error}</b> (${failure.status}) ${failure.message} <span class="quiet">${time(failure.failed_at)}</span></li>`,
    )}</ul></section>`}
    <div class="toolbar">
      <label>Colour tokens by <select value=${colouring} onChange=${(event) => go(to({ colour: event.target.value }))}>
        ${COLOURINGS.map(([name, label]) => html`<option value=${name} selected=${name === colouring}>${label}</option>`)}
      </select></label>
      <label>Spread rewards by <select value=${params.scheme ?? "tree"} onChange=${(event) => go(to({ scheme: event.target.value }))}>
        ${["tree", "broadcast", "arrival", "none"].map((name) => html`<option value=${name} selected=${name === (params.scheme ?? "tree")}>${name}</option>`)}
      </select></label>
      <${Legend} colouring=${colouring} interactions=${interactions} most=${most} />
      <span class="quiet keys"><kbd>j</kbd> <kbd>k</kbd> next, previous call · <kbd>c</kbd> colour</span>
    </div>
    <div class="tree">
      <nav class="outline" aria-label="calls of this episode" tabindex="0">
        <ol>${nodes.map(
          ({ one, i, level, isFork }) => html`<li class=${`in${Math.min(level, 6)}`}>
            <button class=${`plain${i === selected ? " at" : ""}`} aria-current=${i === selected ? "true" : undefined} onClick=${() => move(i)}>
              <span class="quiet">${isFork ? "⑂ " : ""}${i + 1}</span> ${brief(one)}</button></li>`,
        )}</ol>
      </nav>
      <div class="calls">
        ${interactions.length === 0 && html`<p class="quiet">No call of this episode has been answered yet.</p>`}
        ${nodes.map(
          ({ one, i, level, isFork, isNewRoot }) => html`
            <article key=${one.interaction_id} id=${`call-${i}`} class=${`card node in${Math.min(level, 6)}${i === selected ? " at" : ""}`} aria-label=${`call ${i + 1}`}>
              <header><h2>${i + 1}${isFork && html` <span class="badge fork">fork of ${interactions.findIndex((other) => other.interaction_id === one.parent_id) + 1}</span>`}
                ${isNewRoot && html` <span class="badge">new conversation</span>`}</h2>
                <a class="quiet id" href=${to({ call: one.interaction_id })}>${shortId(one.interaction_id)}</a></header>
              <${Facts} one=${one} />
              ${one.tools?.length > 0 && html`<details class="raw"><summary>${number(one.tools.length)} tools: ${one.tools.map((tool) => (tool.function ?? tool).name).join(", ")}</summary>
                <div class="said">${JSON.stringify(one.tools, null, 1)}</div></details>`}
              ${one.request.map((message) => html`<${Message} message=${message} />`)}
              <${Message} message=${one.reply} isReply=${true} />
              <${Tokens} one=${one} colouring=${colouring} most=${most} />
            </article>
          `,
        )}
      </div>
    </div>
  `;
}

const pretty = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return String(text);
  }
};

// ---- A group, side by side

export function GroupPage({ run, group, params }) {
  useTitle(group);
  const offset = Number(params.offset) || 0;
  const answer = useAnswer("group", { run, group, offset, limit: SIDE_BY_SIDE });
  const to = (given) => address(["group", run, group], given);
  if (!answer.data) return html`<${Waiting} of=${answer} />`;
  const { rows, total, episodes } = answer.data;
  return html`
    <p class="crumbs"><a href=${address(["run", run])}>${run}</a> › <a href=${address(["run", run, "groups"])}>groups</a></p>
    <h1 class="name">${group}</h1>
    <p class="facts"><span>task ${rows[0]?.task_id ?? "–"}</span><span>${number(total)} episodes, best first${rows.length > 4 ? "; scroll sideways for more" : ""}</span></p>
    ${
      total > SIDE_BY_SIDE &&
      html`<nav class="pager" aria-label="pages of episodes">
        <button disabled=${offset === 0} onClick=${() => go(to({ offset: Math.max(0, offset - SIDE_BY_SIDE) || undefined }))}>Previous</button>
        <span>${offset + 1}–${offset + rows.length} of ${number(total)}</span>
        <button disabled=${offset + rows.length >= total} onClick=${() => go(to({ offset: offset + SIDE_BY_SIDE }))}>Next</button>
      </nav>`
    }
    <div class="side-by-side" tabindex="0" role="region" aria-label="episodes side by side">
      ${rows.map((row, i) => html`<${Column} key=${row.episode_id} row=${row} told=${episodes[i]} />`)}
    </div>
  `;
}

function Column({ row, told }) {
  return html`
    <section class="card column">
      <h2><a href=${address(["episode", row.episode_id])}>${shortId(row.episode_id)}</a></h2>
      <p class="badges"><${State} state=${row.state} />
        <span class=${`badge ${row.reward > 0 ? "good" : row.reward < 0 ? "bad" : ""}`}>reward ${number(row.reward)}</span>
        <span class="badge">${versions(row)}</span></p>
      <p class="facts"><span>${number(row.n_interactions)} calls</span><span>${number(row.n_output)} tokens</span>${row.reason && html`<span>${row.reason}</span>`}</p>
      ${told.interactions.map(
        (one, i) => html`
          ${one.parent_id !== null && one.edge !== "extends" && html`<p class="badges"><span class="badge warn">${one.edge}${one.cause ? `: ${one.cause}` : ""}</span></p>`}
          ${one.request.map((message) => html`<${Message} message=${message} />`)}
          <${Message} message=${one.reply} isReply=${true} />
          ${one.credit !== null && html`<p class="badges"><a class="quiet" href=${address(["episode", row.episode_id], { call: one.interaction_id })}>call ${i + 1}</a> <span class="badge">credit ${number(one.credit)}</span></p>`}
        `,
      )}
    </section>
  `;
}
