// One run: its curve, its groups and episodes, what was lost and why, and how far engine and trainer are apart.
import { html } from "./vendor/vendor.js";
import { Chart } from "./chart.js";
import { State, Waiting, address, compact, go, number, shortId, time, useAnswer, useTitle, versions } from "./core.js";
import { List } from "./list.js";
import { curves } from "./overview.js";

const TABS = [
  ["curve", "Curve"],
  ["episodes", "Episodes"],
  ["groups", "Groups"],
  ["losses", "Discards and failures"],
  ["gap", "Engine and trainer"],
];

export function Run({ run, tab = "curve", params }) {
  useTitle(run);
  const Tab = { curve: Curve, episodes: Episodes, groups: Groups, losses: Losses, gap: Gap }[tab] ?? Curve;
  return html`
    <h1 class="name">${run}</h1>
    <nav class="tabs" aria-label="of this run">
      ${TABS.map(
        ([name, label]) => html`<a href=${address(name === "curve" ? ["run", run] : ["run", run, name])} aria-current=${name === tab ? "page" : undefined}>${label}</a>`,
      )}
    </nav>
    <${Tab} key=${`${run}/${tab}`} run=${run} params=${params} />
  `;
}

export const objects = (table) => {
  const names = table.columns.map((column) => column.name);
  return table.rows.map((cells) => Object.fromEntries(names.map((name, i) => [name, cells[i]])));
};

function Curve({ run }) {
  const runs = useAnswer("runs");
  const curve = useAnswer("canned/task_curve", { run });
  const health = useAnswer("canned/group_health", { run });
  if (!runs.data || !curve.data) return html`<${Waiting} of=${runs.error ? runs : curve} />`;
  const own = runs.data.find((one) => one.run_id === run);
  if (!own) return html`<p class="problem" role="alert">This book has no run of that name.</p>`;
  const lines = curves(curve.data).map((line) => ({ ...line, label: line.isEval ? "evaluation" : "training" }));
  const rows = objects(curve.data).filter((row) => row.version !== null);
  const tokens = [false, true]
    .map((isEval) => ({
      label: isEval ? "evaluation" : "training",
      points: rows.filter((row) => row.is_eval === isEval && row.tokens_mean !== null).map((row) => ({ x: row.version, y: row.tokens_mean })),
    }))
    .filter((line) => line.points.length);
  return html`
    <dl class="tiles">
      ${[
        ["episodes", number(own.episodes)],
        ["open", number(own.open)],
        ["lost or failed", number(own.failed)],
        ["mean reward", number(own.reward_mean)],
        ["policy version", number(own.version)],
        ["steps", number(own.steps)],
        ["calls", compact(own.calls)],
        ["tokens", compact(own.tokens)],
        ["last event", time(own.last_at)],
      ].map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
    </dl>
    <section class="card">
      <h2>Reward by policy version</h2>
      ${
        lines.length
          ? html`<${Chart} lines=${lines} x="version" y="mean reward" height=${280} onPoint=${(p) => go(p.href)} />
              <p class="quiet">The band is the mean's 95 % interval. Click a point for the episodes behind it.</p>`
          : html`<p class="quiet">No episode of this run has a reward and a policy version yet.</p>`
      }
    </section>
    <div class="columns">
      ${
        tokens.length > 0 &&
        html`<section class="card"><h2>Sampled tokens per episode</h2><${Chart} lines=${tokens} x="version" y="tokens" height=${200} /></section>`
      }
      ${
        health.data &&
        health.data.rows.length > 0 &&
        html`<section class="card"><h2>What its groups can teach</h2>
          <${Plain} rows=${objects(health.data)} columns=${[["health", "groups that are"], ["groups", "groups", 1], ["episodes", "episodes", 1], ["failed", "failed", 1], ["reward_mean", "reward", 1]]} />
        </section>`
      }
    </div>
  `;
}

export function Plain({ rows, columns }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${columns[0][1]}><table class="list">
    <thead><tr>${columns.map(([, label, isNumber]) => html`<th scope="col" class=${isNumber ? "num" : ""}>${label}</th>`)}</tr></thead>
    <tbody>${rows.map(
      (row) => html`<tr>${columns.map(
        ([name, , isNumber, show]) => html`<td class=${isNumber ? "num" : ""}>${show ? show(row) : isNumber ? number(row[name]) : (row[name] ?? "–")}</td>`,
      )}</tr>`,
    )}</tbody>
  </table></div>`;
}

const EPISODE_COLUMNS = [
  { name: "episode_id", label: "episode", show: (row) => shortId(row.episode_id) },
  { name: "state", label: "state", sort: true, show: (row) => html`<${State} state=${row.state} />` },
  { name: "reward", label: "reward", sort: true, isNumber: true, show: (row) => number(row.reward) },
  { name: "version", label: "policy", sort: true, isNumber: true, show: versions },
  { name: "n_interactions", label: "calls", sort: true, isNumber: true, show: (row) => number(row.n_interactions) },
  { name: "n_output", label: "tokens", sort: true, isNumber: true, show: (row) => number(row.n_output) },
  { name: "n_taken", label: "in batches", sort: true, isNumber: true, show: (row) => number(row.n_taken) },
  { name: "group_id", label: "group", sort: true, show: (row) => row.group_id && html`<a href=${address(["group", row.run_id, row.group_id])}>${row.group_id}</a>` },
  { name: "seconds", label: "seconds", sort: true, isNumber: true, show: (row) => number(row.seconds, 1) },
  { name: "opened_at", label: "began", sort: true, show: (row) => html`<span class="time">${time(row.opened_at)}</span>` },
  { name: "reason", label: "reason", show: (row) => row.reason },
];

function Episodes({ run, params }) {
  const chosen = ["state", "reason", "version", "is_eval"].filter((name) => params[name] !== undefined);
  return html`
    ${
      chosen.length > 0 &&
      html`<p class="chips">${chosen.map(
        (name) => html`<a class="chip" href=${address(["run", run, "episodes"], { ...params, [name]: undefined, offset: undefined })} title="Remove this filter">${name === "is_eval" ? (params.is_eval === "true" ? "evaluation" : "training") : `${name} ${params[name]}`} ×</a>`,
      )}</p>`
    }
    <${List} path="episodes" noun="episodes" columns=${EPISODE_COLUMNS} params=${params}
      fixed=${{ run, state: params.state, reason: params.reason, version: params.version, is_eval: params.is_eval }}
      to=${(given) => address(["run", run, "episodes"], given)}
      href=${(row) => address(["episode", row.episode_id])} rowKey=${(row) => row.episode_id} />
  `;
}

const GROUP_COLUMNS = [
  { name: "group_id", label: "group", sort: true, show: (row) => row.group_id },
  { name: "n_episodes", label: "episodes", sort: true, isNumber: true, show: (row) => number(row.n_episodes) },
  { name: "n_done", label: "ended", sort: true, isNumber: true, show: (row) => number(row.n_done) },
  { name: "n_rewarded", label: "with reward", sort: true, isNumber: true, show: (row) => number(row.n_rewarded) },
  { name: "reward_mean", label: "mean", sort: true, isNumber: true, show: (row) => number(row.reward_mean) },
  { name: "reward_std", label: "deviation", sort: true, isNumber: true, show: (row) => number(row.reward_std) },
  { name: "task_id", label: "task", sort: true, show: (row) => row.task_id },
];

function Groups({ run, params }) {
  return html`<${List} path="groups" noun="groups" columns=${GROUP_COLUMNS} params=${params} fixed=${{ run }}
    to=${(given) => address(["run", run, "groups"], given)}
    href=${(row) => address(["group", run, row.group_id])} rowKey=${(row) => row.group_id} />`;
}

const FAILURE_COLUMNS = [
  { name: "episode_id", label: "episode", show: (row) => shortId(row.episode_id) },
  { name: "error", label: "error", sort: true, show: (row) => row.error },
  { name: "status", label: "status", sort: true, isNumber: true, show: (row) => number(row.status) },
  { name: "message", label: "message", show: (row) => html`<span class="wrap">${row.message}</span>` },
  { name: "failed_at", label: "when", sort: true, show: (row) => html`<span class="time">${time(row.failed_at)}</span>` },
];

function Losses({ run, params }) {
  const losses = useAnswer("losses", { run });
  if (!losses.data) return html`<${Waiting} of=${losses} />`;
  const { discards, endings, errors } = losses.data;
  const behind = (row) => address(["run", run, "episodes"], { state: row.state, reason: row.reason });
  return html`
    <div class="columns">
      <section class="card"><h2>Left out of batches</h2>
        ${discards.length ? html`<${Plain} rows=${discards} columns=${[["reason", "reason"], ["episodes", "episodes", 1], ["batches", "batches", 1], ["first_step", "from step", 1], ["last_step", "to step", 1]]} />` : html`<p class="quiet">No batch left anything out.</p>`}
      </section>
      <section class="card"><h2>Episodes that did not end well</h2>
        ${endings.length ? html`<${Plain} rows=${endings} columns=${[["state", "state", 0, (row) => html`<a href=${behind(row)}>${row.state}</a>`], ["reason", "reason", 0, (row) => html`<span class="wrap">${row.reason ?? "–"}</span>`], ["episodes", "episodes", 1], ["last_at", "last", 0, (row) => html`<span class="time">${time(row.last_at).slice(5, 16)}</span>`]]} />` : html`<p class="quiet">All that ended, ended well.</p>`}
      </section>
      <section class="card"><h2>Calls without an answer</h2>
        ${errors.length ? html`<${Plain} rows=${errors} columns=${[["error", "error"], ["status", "status", 1], ["calls", "calls", 1], ["last_at", "last", 0, (row) => html`<span class="time">${time(row.last_at).slice(5, 16)}</span>`]]} />` : html`<p class="quiet">Every call was answered.</p>`}
      </section>
    </div>
    ${
      errors.length > 0 &&
      html`<section><h2>Each of those calls</h2>
        <${List} path="failures" noun="failures" columns=${FAILURE_COLUMNS} params=${params} fixed=${{ run }}
          to=${(given) => address(["run", run, "losses"], given)} href=${(row) => address(["episode", row.episode_id])}
          rowKey=${(row, i) => `${row.episode_id}/${row.failed_at}/${i}`} />
      </section>`
    }
  `;
}

function Gap({ run }) {
  const gap = useAnswer("canned/logprob_gap_by_staleness", { run });
  const age = useAnswer("canned/staleness", { run });
  const entropy = useAnswer("canned/entropy_by_step", { run });
  if (!gap.data || !age.data || !entropy.data) return html`<${Waiting} of=${[gap, age, entropy].find((one) => one.error) ?? gap} />`;
  const line = (rows, label, x, y, note) => ({
    label,
    points: rows.filter((row) => row[x] !== null && row[y] !== null).map((row) => ({ x: row[x], y: row[y], note: note?.(row) })),
  });
  const gaps = objects(gap.data);
  const scorers = [...new Set(gaps.map((row) => row.scorer))];
  const calls = (row) => `${number(row.interactions)} calls`;
  const ages = objects(age.data);
  const entropies = objects(entropy.data);
  return html`
    <section class="card"><h2>Trainer minus engine logprob, by staleness</h2>
      ${
        gaps.length
          ? html`<${Chart} x="versions between" y="nats per token" lines=${scorers.flatMap((scorer) => {
              const own = gaps.filter((row) => row.scorer === scorer);
              return [line(own, `${scorer}: size of the gap`, "staleness", "gap_abs_mean", calls), line(own, `${scorer}: mean`, "staleness", "gap_mean", calls)];
            })} /><p class="quiet">At staleness 0 both read the same weights: what is left there is arithmetic. From 1 on it is also what was learnt since.</p>`
          : html`<p class="quiet">No stored answer of this run has been scored under other weights yet.</p>`
      }
    </section>
    <div class="columns">
      <section class="card"><h2>Age of what was trained on</h2>
        ${ages.length ? html`<${Chart} x="step" y="versions" height=${200} lines=${[line(ages, "oldest, mean", "step", "oldest_mean"), line(ages, "oldest, max", "step", "oldest_max")]} />` : html`<p class="quiet">No batch has been taken yet.</p>`}
      </section>
      <section class="card"><h2>Entropy</h2>
        ${entropies.length ? html`<${Chart} x="step" y="nats per token" height=${200} lines=${[line(entropies, "mean", "step", "entropy_mean")]} />` : html`<p class="quiet">Entropies were not recorded.</p>`}
      </section>
    </div>
  `;
}
