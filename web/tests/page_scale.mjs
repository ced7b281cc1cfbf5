// Measures how long the page takes to draw one snapshot of a large job, and how long its frames are while it scrolls.
// Arguments: folder of playwright-core, Chromium, address, folder for pictures. Prints one JSON object.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

const [modules, browserPath, url, pictures] = process.argv.slice(2);
const { chromium } = createRequire(join(modules, "x.js"))("playwright-core");
const browser = await chromium.launch({ executablePath: browserPath, args: ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"] });
const page = await browser.newPage({ viewport: { width: 1280, height: 860 } });
page.setDefaultTimeout(120000);
await page.goto(url);
await page.waitForFunction(() => document.body.dataset.number);
const draws = [];
// "Problems only" draws the whole snapshot again.
for (let n = 0; n < 8; n += 1) {
  await page.evaluate(() => { document.body.dataset.drawMs = ""; });
  await page.keyboard.press("z");
  await page.waitForFunction(() => document.body.dataset.drawMs !== "");
  draws.push(Number(await page.evaluate(() => document.body.dataset.drawMs)));
}
await page.locator("#timeline").scrollIntoViewIfNeeded();
await page.waitForTimeout(1500);
const frames = await page.evaluate(() => new Promise((done) => {
  const pane = document.getElementById("timeline-pane");
  const times = [];
  const step = (now) => {
    times.push(now);
    pane.scrollTop += 40;
    if (times.length < 120) requestAnimationFrame(step);
    else done(times.slice(1).map((time, i) => time - times[i]).sort((a, b) => a - b));
  };
  requestAnimationFrame(step);
}));
// Only the culprit's host has a row; the others are behind one button.
await page.waitForFunction(() => document.querySelector("#verdict .stuck"));
const rows = () => page.locator("#ranks .host:visible").count();
await page.waitForFunction(() => document.querySelector("#ranks .trouble .root"));
assert.equal(await rows(), 1);
await page.locator("#ranks-fold").click();
assert.equal(await rows(), 128);
await page.locator("#ranks-fold").click();
await page.evaluate(() => scrollTo(0, 0));
await page.screenshot({ path: join(pictures, "scale.png") });
draws.sort((a, b) => a - b);
process.stdout.write(`${JSON.stringify({ draw_ms: { median: draws[4], max: draws.at(-1) }, scroll_frame_ms: { median: frames[60], p95: frames[113] } })}\n`);
await browser.close();
