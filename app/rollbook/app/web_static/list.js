// A long list, a page at a time: the server filters, sorts and counts, so a million rows cost no more than a hundred.
import { html, useEffect, useRef, useState } from "./vendor/vendor.js";
import { Problem, Waiting, go, number, useAnswer, useKeys } from "./core.js";

const AT_ONCE = 100;

// columns: [{ name, label, sort?: true, isNumber?, show(row) }]; fixed: what is not the person's to change.
// params: of the address; to(params): an address with others; href(row): where a row leads.
export function List({ path, columns, fixed = {}, params, to, href, noun, rowKey }) {
  const offset = Number(params.offset) || 0;
  const asked = { ...fixed, where: params.where, sort: params.sort, offset, limit: AT_ONCE };
  const answer = useAnswer(path, asked);
  const [at, setAt] = useState(-1);
  const place = useRef(-1); // the same as `at`, but already moved when keys come faster than pictures
  const body = useRef(null);
  const rows = answer.data?.rows ?? [];
  useEffect(() => {
    place.current = -1;
    setAt(-1);
  }, [JSON.stringify(asked)]);
  const move = (by) => {
    const next = Math.max(0, Math.min(rows.length - 1, place.current + by));
    place.current = next;
    setAt(next);
    body.current?.querySelectorAll("tr")[next]?.querySelector("a")?.focus();
  };
  useKeys({ j: () => move(1), k: () => move(-1), Enter: () => rows[place.current] && href && go(href(rows[place.current])) });

  const sortBy = (column) => {
    const down = `-${column.name}`;
    go(to({ ...params, sort: params.sort === down ? column.name : down, offset: undefined }));
  };
  const direction = (column) => (params.sort === column.name ? "ascending" : params.sort === `-${column.name}` ? "descending" : undefined);
  const total = answer.data?.total ?? 0;
  return html`
    <${Filter} value=${params.where ?? ""} noun=${noun} onChange=${(where) => go(to({ ...params, where, offset: undefined }))} />
    ${answer.error && html`<${Problem} error=${answer.error} />`}
    ${!answer.data && !answer.error && html`<${Waiting} of=${answer} />`}
    ${
      answer.data &&
      html`
        <div class=${`scroll${answer.isStale ? " stale" : ""}`} tabindex="0" role="region" aria-label=${noun}>
          <table class="list">
            <thead><tr>
              ${columns.map(
                (column) => html`<th scope="col" class=${column.isNumber ? "num" : ""} aria-sort=${direction(column)}>
                  ${
                    column.sort
                      ? html`<button class="plain" onClick=${() => sortBy(column)}>${column.label}${
                          { ascending: " ↑", descending: " ↓" }[direction(column)] ?? ""
                        }</button>`
                      : column.label
                  }
                </th>`,
              )}
            </tr></thead>
            <tbody ref=${body}>
              ${rows.map(
                (row, i) => html`<tr key=${rowKey(row, i)} class=${i === at ? "at" : ""}>
                  ${columns.map(
                    (column, c) => html`<td class=${column.isNumber ? "num" : ""}>${
                      c === 0 && href ? html`<a href=${href(row)}>${column.show(row)}</a>` : column.show(row)
                    }</td>`,
                  )}
                </tr>`,
              )}
            </tbody>
          </table>
        </div>
        ${total === 0 && html`<p class="quiet">No ${noun} here.</p>`}
        <nav class="pager" aria-label=${`pages of ${noun}`}>
          <button disabled=${offset === 0} onClick=${() => go(to({ ...params, offset: Math.max(0, offset - AT_ONCE) || undefined }))}>Previous</button>
          <span>${total ? `${number(offset + 1)}–${number(offset + rows.length)} of ${number(total)}` : "0"}</span>
          <button disabled=${offset + rows.length >= total} onClick=${() => go(to({ ...params, offset: offset + AT_ONCE }))}>Next</button>
        </nav>
      `
    }
  `;
}

function Filter({ value, noun, onChange }) {
  const [typed, setTyped] = useState(value);
  useEffect(() => setTyped(value), [value]);
  return html`
    <form class="filter" onSubmit=${(event) => {
      event.preventDefault();
      onChange(typed.trim());
    }}>
      <label>Only ${noun} where <input type="text" value=${typed} spellcheck=${false} autocomplete="off" autocapitalize="off"
        placeholder=${noun === "groups" ? "reward_std > 0" : noun === "episodes" ? "reward > 0.5 and n_interactions > 2" : "status >= 500"}
        onInput=${(event) => setTyped(event.target.value)} /></label>
      <button type="submit">Filter</button>
      ${value && html`<button type="button" onClick=${() => onChange("")}>Clear</button>`}
    </form>
  `;
}
