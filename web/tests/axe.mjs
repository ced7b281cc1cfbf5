// Holds the page and the report as HTML against the rules of axe-core. Arguments: folder of playwright-core, Chromium,
// folder of axe-core, address of a job that gets stuck, file of a report.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, browserPath, axeFolder, url, report] = process.argv.slice(2);
const { chromium } = createRequire(join(modules, "x.js"))("playwright-core");
const axe = readFileSync(join(axeFolder, "node_modules/axe-core/axe.min.js"), "utf8");
const browser = await chromium.launch({
  executablePath: browserPath,
  args: ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"],
});
const found = [];
let checks = 0;

async function check(page, what) {
  const { violations, passes } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ["violations"] }));
  assert.ok(passes.length > 10, `${what}: axe applied ${passes.length} rules only`);
  checks += 1;
  for (const { id, nodes } of violations) for (const { target, failureSummary } of nodes) found.push(`${what}: ${id} at ${target}: ${failureSummary}`);
}

for (const width of [1440, 800, 390]) {
  for (const colorScheme of ["light", "dark"]) {
    // The page forbids scripts from elsewhere, and axe is one.
    const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, bypassCSP: true });
    const page = await context.newPage();
    page.setDefaultTimeout(120000);
    await page.addInitScript(axe);
    await page.goto(url);
    await page.waitForFunction(() => document.querySelector("#verdict .stuck"));
    // A browser leaves out what is out of sight.
    await page.addStyleTag({ content: "section { content-visibility: visible !important }" });
    await page.evaluate(() => document.querySelectorAll("details").forEach((details) => { details.open = true; }));
    await check(page, `page ${width} ${colorScheme}`);
    await page.keyboard.press("?");
    await page.waitForFunction(() => document.getElementById("help").open);
    await check(page, `help ${width} ${colorScheme}`);
    await page.keyboard.press("Escape");
    await page.locator("#ranks .root").click();
    await page.waitForFunction(() => document.getElementById("rank").open);
    await check(page, `rank ${width} ${colorScheme}`);
    await page.goto(pathToFileURL(report).href);
    await check(page, `report ${width} ${colorScheme}`);
    await page.evaluate(() => document.querySelectorAll("details").forEach((details) => { details.open = true; }));
    await check(page, `opened report ${width} ${colorScheme}`);
    await context.close();
  }
}
await browser.close();
assert.deepEqual(found, []);
process.stdout.write(`axe: ${checks} checks, no violation\n`);
