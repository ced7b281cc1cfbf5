// Makes a PNG of each SVG in a folder, in its place. Arguments: folder of playwright-core, Chromium, the folder.
import { createRequire } from "node:module";
import { readFile, readdir, unlink } from "node:fs/promises";
import { join } from "node:path";

const [modules, browserPath, folder] = process.argv.slice(2);
const { chromium } = createRequire(join(modules, "x.js"))("playwright-core");
const browser = await chromium.launch({ executablePath: browserPath, args: ["--no-sandbox", "--disable-gpu"] });
const page = await browser.newPage();
for (const name of (await readdir(folder)).filter((name) => name.endsWith(".svg"))) {
  const path = join(folder, name);
  await page.setContent(`<style>body { margin: 0 } svg { display: block }</style>${await readFile(path, "utf8")}`);
  await page.locator("svg").screenshot({ path: path.replace(/svg$/, "png") });
  await unlink(path);
}
await browser.close();
