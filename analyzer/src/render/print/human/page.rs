//! Writes lines of text: wrapping, the column of keys, colors.

use anstyle::{AnsiColor, Style};
use rcomm_verdict::format::printable;
use std::io::{self, Write};
use textwrap::{Options, WordSeparator, WordSplitter, core::display_width};

/// The style of errors.
pub(super) const ALARM: Style = AnsiColor::Red.on_default().bold();
/// The style of warnings.
pub(super) const CAUTION: Style = AnsiColor::Yellow.on_default().bold();
/// The style of good states.
pub(super) const FINE: Style = AnsiColor::Green.on_default().bold();
/// The style of the next step and of titles.
pub(super) const ACT: Style = Style::new().bold();
/// The style of keys and minor text.
pub(super) const DIM: Style = Style::new().dimmed();
/// Text without a style.
pub(super) const PLAIN: Style = Style::new();

/// The width of the keys with their indent, in columns.
const KEY_WIDTH: usize = 13;

/// The smallest width to which lines are wrapped, in columns.
const MIN_WIDTH: usize = 40;

/// The amount of detail on a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    /// Only the facts that are needed to act.
    #[default]
    Brief,
    /// Also the evidence, the groups, the ranks and the stacks.
    Verbose,
}

/// The layout of a page.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// The width in columns; a width below 40 counts as 40.
    pub width: usize,
    /// The amount of detail on a page.
    pub detail: Detail,
}

impl Default for Layout {
    fn default() -> Self {
        Self {
            width: 80,
            detail: Detail::Brief,
        }
    }
}

/// Writes the lines of a page to `out`.
pub(super) struct Page<'a> {
    out: &'a mut dyn Write,
    width: usize,
    detail: Detail,
}

impl<'a> Page<'a> {
    pub(super) fn new(layout: &Layout, out: &'a mut dyn Write) -> Self {
        Self {
            out,
            width: layout.width.max(MIN_WIDTH),
            detail: layout.detail,
        }
    }

    pub(super) fn detail(&self) -> Detail {
        self.detail
    }

    pub(super) fn blank(&mut self) -> io::Result<()> {
        writeln!(self.out)
    }

    /// Writes `HEAD text`; further lines are aligned with the text.
    pub(super) fn headline(&mut self, head: &str, style: Style, text: &str) -> io::Result<()> {
        let indent = " ".repeat(display_width(head) + 2);
        self.wrapped(&format!("{head}  "), style, &indent, ACT, text)
    }

    /// Writes text from the left margin.
    pub(super) fn plain(&mut self, style: Style, text: &str) -> io::Result<()> {
        self.wrapped("", PLAIN, "", style, text)
    }

    /// Writes ` key text`; further lines are aligned with the text. An empty key continues the item above.
    pub(super) fn item(&mut self, key: &str, style: Style, text: &str) -> io::Result<()> {
        let head = format!("{:KEY_WIDTH$}", format!("  {key}"));
        self.wrapped(&head, DIM, &" ".repeat(KEY_WIDTH), style, text)
    }

    /// Writes ` - text`; further lines are aligned with the text.
    pub(super) fn bullet(&mut self, text: &str) -> io::Result<()> {
        self.wrapped("  - ", DIM, "    ", PLAIN, text)
    }

    /// Writes several texts under one key.
    pub(super) fn items<T: AsRef<str>>(
        &mut self,
        key: &str,
        texts: impl IntoIterator<Item = T>,
    ) -> io::Result<()> {
        let mut key = key;
        for text in texts {
            self.item(key, PLAIN, text.as_ref())?;
            key = "";
        }
        Ok(())
    }

    /// Writes a line of a table or tree without wrapping, cut at the width of the page.
    pub(super) fn row(&mut self, style: Style, text: &str) -> io::Result<()> {
        let text = printable(text);
        let mut line = text.trim_end();
        let cut;
        if display_width(line) > self.width {
            cut = cut_to(line, self.width.saturating_sub(1));
            line = &cut;
        }
        writeln!(self.out, "{style}{line}{style:#}")
    }

    /// Writes `head` and wrapped text; lines after the first begin with `indent`.
    fn wrapped(
        &mut self,
        head: &str,
        head_style: Style,
        indent: &str,
        style: Style,
        text: &str,
    ) -> io::Result<()> {
        let text = printable(text);
        let options = Options::new(self.width)
            .initial_indent(head)
            .subsequent_indent(indent)
            // Paths and names are copied by users, so they are never broken.
            .break_words(false)
            .word_splitter(WordSplitter::NoHyphenation)
            .word_separator(WordSeparator::AsciiSpace);
        for (index, line) in textwrap::wrap(&text, options).iter().enumerate() {
            if let Some(body) = line.strip_prefix(head).filter(|_| index == 0) {
                writeln!(
                    self.out,
                    "{head_style}{head}{head_style:#}{style}{body}{style:#}"
                )?;
            } else if let Some(body) = line.strip_prefix(indent) {
                writeln!(self.out, "{indent}{style}{body}{style:#}")?;
            } else {
                writeln!(self.out, "{style}{line}{style:#}")?;
            }
        }
        Ok(())
    }
}

/// The part of `text` that fits into `width` columns, and an ellipsis, which takes one more.
fn cut_to(text: &str, width: usize) -> String {
    let mut kept = String::new();
    let mut used = 0;
    for c in text.chars() {
        let mut buffer = [0; 4];
        used += display_width(c.encode_utf8(&mut buffer));
        if used > width {
            break;
        }
        kept.push(c);
    }
    kept.push('…');
    kept
}
