// All runs: how each is doing, and their reward curves in one picture.
import { html } from "./vendor/vendor.js";
import { Chart } from "./chart.js";
import { Waiting, address, compact, go, number, time, useAnswer, useTitle } from "./core.js";

const SHOWN = 6;

// Rows of `task_curve` as lines: one per run, training and evaluation apart, with the mean's 95 % interval.
export function curves(answer) {
  const names = answer.columns.map((column) => column.name);
  const lines = new Map();
  for (const cells of answer.rows) {
    const row = Object.fromEntries(names.map((name, i) => [name, cells[i]]));
    if (row.reward_mean === null || row.version === null) continue;
    const label = `${row.run_id}${row.is_eval ? " (evaluation)" : ""}`;
    if (!lines.has(label)) lines.set(label, { label, run: row.run_id, isEval: row.is_eval, points: [] });
    const half = row.rewarded > 1 ? (1.96 * row.reward_std) / Math.sqrt(row.rewarded) : 0;
    lines.get(label).points.push({
      x: row.version,
      y: row.reward_mean,
      low: row.reward_mean - half,
      high: row.reward_mean + half,
      note: `${number(row.episodes)} episodes`,
      href: address(["run", row.run_id, "episodes"], { version: row.version, is_eval: row.is_eval }),
    });
  }
  return [...lines.values()];
}

export function Overview() {
  useTitle("Runs");
  const runs = useAnswer("runs");
  const curve = useAnswer("canned/task_curve");
  if (!runs.data) return html`<${Waiting} of=${runs} />`;
  const newest = runs.data.map((run) => run.run_id);
  const all = curve.data ? curves(curve.data) : [];
  // Training alone, where there is any: evaluation is on the run's own page.
  const lines = all
    .filter((line) => !line.isEval || !all.some((other) => other.run === line.run && !other.isEval))
    .sort((a, b) => newest.indexOf(a.run) - newest.indexOf(b.run));
  return html`
    <h1>Runs</h1>
    ${
      lines.length > 0 &&
      html`
        <section class="card">
          <h2>Reward by policy version</h2>
          <${Chart} lines=${lines.slice(0, SHOWN)} x="version" y="mean reward" onPoint=${(p) => go(p.href)} />
          <p class="quiet">The band is the mean's 95 % interval. Click a point for the episodes behind it.${
            lines.length > SHOWN ? ` The newest ${SHOWN} of ${lines.length} curves are drawn.` : ""
          }</p>
        </section>
      `
    }
    ${
      runs.data.length === 0
        ? html`<p class="quiet">Nothing has been recorded in this book yet. This page follows as soon as something is.</p>`
        : html`<div class="scroll" tabindex="0" role="region" aria-label="runs">
            <table class="list">
              <thead><tr>
                <th scope="col">run</th><th scope="col" class="num">episodes</th><th scope="col" class="num">open</th><th scope="col" class="num">lost or failed</th>
                <th scope="col" class="num">reward</th><th scope="col" class="num">evaluation</th><th scope="col" class="num">version</th><th scope="col" class="num">steps</th>
                <th scope="col" class="num">calls</th><th scope="col" class="num">tokens</th><th scope="col">started</th><th scope="col">last event</th>
              </tr></thead>
              <tbody>
                ${runs.data.map(
                  (run) => html`<tr key=${run.run_id}>
                    <td><a href=${address(["run", run.run_id])}>${run.run_id}</a></td>
                    <td class="num">${number(run.episodes)}</td><td class="num">${number(run.open)}</td><td class="num">${number(run.failed)}</td>
                    <td class="num">${number(run.reward_mean)}</td><td class="num">${number(run.eval_mean)}</td>
                    <td class="num">${number(run.version)}</td><td class="num">${number(run.steps)}</td>
                    <td class="num">${compact(run.calls)}</td><td class="num">${compact(run.tokens)}</td>
                    <td class="time">${time(run.started_at).slice(0, 16)}</td><td class="time">${time(run.last_at).slice(0, 16)}</td>
                  </tr>`,
                )}
              </tbody>
            </table>
          </div>`
    }
  `;
}
