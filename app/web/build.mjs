// Builds app/rollbook/app/web_static/vendor/: the libraries of the page as one file, their stylesheet, their licences.
// The page's own modules are written by hand and need no build.
import { build } from "esbuild";
import { copyFileSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";

const out = "../rollbook/app/web_static/vendor";
const { dependencies } = JSON.parse(readFileSync("package.json", "utf8"));
mkdirSync(out, { recursive: true });
await build({
  entryPoints: ["vendor.mjs"],
  outfile: `${out}/vendor.js`,
  bundle: true,
  format: "esm",
  minify: true,
  target: "es2022",
  legalComments: "none",
  banner: { js: "/* preact, htm and uPlot, built by `make web`; licences in LICENSES.txt */" },
});
copyFileSync("node_modules/uplot/dist/uPlot.min.css", `${out}/uPlot.min.css`);
const licences = Object.keys(dependencies).map(
  (name) => `${name} ${dependencies[name]}\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim()}\n`,
);
writeFileSync(`${out}/LICENSES.txt`, licences.join(`\n${"-".repeat(80)}\n\n`));
