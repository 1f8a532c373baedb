// Lines over a number, with bands, on uPlot. A point can be clicked; the same points are a table for keyboards and readers.
import { html, uPlot, useEffect, useRef, useState } from "./vendor/vendor.js";
import { number } from "./core.js";

const dark = matchMedia("(prefers-color-scheme: dark)");
const COLOURS = 6;

function colours(node) {
  const style = getComputedStyle(node);
  const of = (name) => style.getPropertyValue(name).trim();
  return { lines: Array.from({ length: COLOURS }, (_, i) => of(`--line-${i}`)), text: of("--quiet"), grid: of("--edge") };
}

// A computed colour is rgb(...); the same, so far see-through.
const faint = (colour, alpha) => colour.replace("rgb(", "rgba(").replace(")", `, ${alpha})`);

// lines: [{ label, points: [{ x, y, low?, high?, href?, note? }] }]
export function Chart({ lines, x, y, height = 240, onPoint, kind = "line" }) {
  const box = useRef(null);
  const [over, setOver] = useState(null);
  const [isDark, setIsDark] = useState(dark.matches);
  useEffect(() => {
    const change = () => setIsDark(dark.matches);
    dark.addEventListener("change", change);
    return () => dark.removeEventListener("change", change);
  }, []);

  useEffect(() => {
    const node = box.current;
    const own = colours(node);
    const xs = [...new Set(lines.flatMap((line) => line.points.map((p) => p.x)))].sort((a, b) => a - b);
    const place = new Map(xs.map((value, i) => [value, i]));
    const data = [xs];
    const series = [{}];
    const bands = [];
    lines.forEach((line, i) => {
      const colour = own.lines[i % COLOURS];
      const column = (name) => {
        const values = Array(xs.length).fill(null);
        for (const p of line.points) values[place.get(p.x)] = p[name] ?? null;
        return values;
      };
      data.push(column("y"));
      series.push({
        stroke: colour,
        width: 2,
        spanGaps: true,
        points: { show: xs.length <= 120, size: 7, fill: colour },
        ...(kind === "bars" && { paths: uPlot.paths.bars({ size: [0.7, 60] }), fill: faint(colour, 0.35), points: { show: false } }),
      });
      if (line.points.some((p) => p.low !== undefined)) {
        const at = data.length;
        data.push(column("high"), column("low"));
        const hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
        series.push(hidden, hidden);
        bands.push({ series: [at, at + 1], fill: faint(colour, 0.16) });
      }
    });
    const whole = xs.every(Number.isInteger);
    const axis = (label, side) => ({
      stroke: own.text,
      label,
      labelSize: 20,
      labelFont: "12px system-ui",
      font: "12px system-ui",
      grid: { stroke: own.grid, width: 1 },
      ticks: { stroke: own.grid, width: 1 },
      ...(side === "x" && whole && { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5, 1e6] }),
      ...(side === "x" && { size: 28 }),
      ...(side === "y" && { size: 56, values: (_, ticks) => ticks.map((value) => number(value)) }),
    });
    const plot = new uPlot(
      {
        width: node.clientWidth,
        height,
        series,
        bands,
        legend: { show: false },
        cursor: { drag: { x: false, y: false }, focus: { prox: 24 } },
        scales: {
          x: {
            time: false,
            range: (_, low, high) => {
              const room = kind === "bars" || low === high ? 0.6 : (high - low) * 0.02;
              return [low - room, high + room];
            },
          },
          // Bars stand on zero.
          ...(kind === "bars" && { y: { range: (_, low, high) => [Math.min(0, low) * 1.1, Math.max(0, high) * 1.1 || 1] } }),
        },
        axes: [axis(x, "x"), axis(y, "y")],
        hooks: {
          setCursor: [
            (plot) => {
              const i = plot.cursor.idx;
              const at = i === null || i === undefined ? null : xs[i];
              setOver(
                at === null ? null : { x: at, values: lines.map((line) => line.points.find((p) => p.x === at) ?? null) },
              );
            },
          ],
        },
      },
      data,
      node,
    );
    const resize = new ResizeObserver(() => plot.setSize({ width: node.clientWidth, height }));
    resize.observe(node);
    const click = (event) => {
      // Where the click is, not where the cursor was last seen: a plot that was just drawn anew has seen none.
      const box = plot.over.getBoundingClientRect();
      const i = plot.posToIdx(event.clientX - box.left);
      if (!onPoint || i === null || i === undefined) return;
      // The line nearest to the pointer is meant.
      const near = lines
        .map((line) => line.points.find((p) => p.x === xs[i]))
        .filter((p) => p && p.y !== null)
        .map((p) => [Math.abs(plot.valToPos(p.y, "y") - (event.clientY - box.top)), p])
        .sort((a, b) => a[0] - b[0])[0];
      if (near) onPoint(near[1]);
    };
    plot.over.addEventListener("click", click);
    return () => {
      resize.disconnect();
      plot.destroy();
    };
  }, [JSON.stringify(lines), isDark, height, kind]);

  return html`
    <figure class="chart">
      <div class=${`plot${onPoint ? " can-click" : ""}`} ref=${box} aria-hidden="true"></div>
      <figcaption>
        ${lines.map(
          (line, i) => html`
            <span class="key"><i class=${`swatch line-${i % COLOURS}`}></i>${line.label}
              ${over?.values[i] && html` <b>${number(over.values[i].y)}</b>${over.values[i].note && ` ${over.values[i].note}`}`}
            </span>
          `,
        )}
        ${over && html`<span class="quiet">${x} ${number(over.x)}</span>`}
      </figcaption>
      <details class="points">
        <summary>As a table</summary>
        <div class="scroll" tabindex="0" role="region" aria-label=${`${y} by ${x}`}>
          <table>
            <thead><tr><th scope="col">line</th><th scope="col" class="num">${x}</th><th scope="col" class="num">${y}</th><th scope="col"></th></tr></thead>
            <tbody>
              ${lines.flatMap((line) =>
                line.points.map(
                  (p) => html`<tr>
                    <td>${line.label}</td><td class="num">${number(p.x)}</td><td class="num">${number(p.y)}</td>
                    <td>${p.href ? html`<a href=${p.href}>${p.note ?? "episodes"}</a>` : p.note}</td>
                  </tr>`,
                ),
              )}
            </tbody>
          </table>
        </div>
      </details>
    </figure>
  `;
}
