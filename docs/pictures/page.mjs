// Takes pictures of the whole page. Arguments: folder of playwright-core, Chromium, address, folder for the pictures, the
// beginning of their names, widths.
import { createRequire } from "node:module";
import { join } from "node:path";

const [modules, browserPath, url, folder, name, ...widths] = process.argv.slice(2);
const { chromium } = createRequire(join(modules, "x.js"))("playwright-core");
const browser = await chromium.launch({ executablePath: browserPath, args: ["--no-sandbox", "--disable-gpu"] });
for (const width of widths.map(Number)) {
  for (const colorScheme of ["light", "dark"]) {
    const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme, bypassCSP: true });
    const page = await context.newPage();
    await page.goto(url);
    await page.waitForFunction(() => document.querySelector("#verdict .word"));
    // The timeline asks for its operations once it is in sight.
    await page.locator("#timeline").scrollIntoViewIfNeeded();
    await page.waitForFunction(() => document.querySelector("#timeline-kinds").childElementCount > 0);
    await page.evaluate(() => scrollTo(0, 0));
    // A browser leaves out what is out of sight, and the picture is of the whole page.
    await page.addStyleTag({ content: "section { content-visibility: visible !important }" });
    const path = join(folder, `${name}-${width}-${colorScheme}.png`);
    await page.screenshot({ path, fullPage: true });
    console.log(path);
    await context.close();
  }
}
await browser.close();
