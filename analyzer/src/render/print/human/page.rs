//! Lines on a page: wrapping, the column of keys, colours.

use anstyle::{AnsiColor, Style};
use rcomm_verdict::format::printable;
use std::io::{self, Write};
use textwrap::{Options, WordSeparator, WordSplitter, core::display_width};

/// Something is broken.
pub(super) const ALARM: Style = AnsiColor::Red.on_default().bold();
/// Something is not as it should be.
pub(super) const CAUTION: Style = AnsiColor::Yellow.on_default().bold();
/// Nothing is wrong.
pub(super) const FINE: Style = AnsiColor::Green.on_default().bold();
/// What to do.
pub(super) const ACT: Style = Style::new().bold();
/// The column of keys, and small print.
pub(super) const DIM: Style = Style::new().dimmed();
/// No style.
pub(super) const PLAIN: Style = Style::new();

/// How wide the keys' column is, with its indent.
const KEY_WIDTH: usize = 13;

/// Below this no line is wrapped any more: there is no room to read.
const MIN_WIDTH: usize = 40;

/// How much is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    /// What one needs to act.
    #[default]
    Brief,
    /// With the evidence, the groups, the ranks and the stacks.
    Verbose,
}

/// The shape of the page.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Columns; at least 40 are used.
    pub width: usize,
    /// How much is printed.
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

/// A page under the pen.
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

    /// `HEAD  text`, wrapped under the text.
    pub(super) fn headline(&mut self, head: &str, style: Style, text: &str) -> io::Result<()> {
        let indent = " ".repeat(display_width(head) + 2);
        self.wrapped(&format!("{head}  "), style, &indent, ACT, text)
    }

    /// Text from the left margin.
    pub(super) fn plain(&mut self, style: Style, text: &str) -> io::Result<()> {
        self.wrapped("", PLAIN, "", style, text)
    }

    /// `  key        text`, wrapped under the text. An empty key continues the one above.
    pub(super) fn item(&mut self, key: &str, style: Style, text: &str) -> io::Result<()> {
        let head = format!("{:KEY_WIDTH$}", format!("  {key}"));
        self.wrapped(&head, DIM, &" ".repeat(KEY_WIDTH), style, text)
    }

    /// `  - text`, wrapped under the text.
    pub(super) fn bullet(&mut self, text: &str) -> io::Result<()> {
        self.wrapped("  - ", DIM, "    ", PLAIN, text)
    }

    /// Several texts under one key.
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

    /// A line as it is: tables and trees, which wrapping would destroy. Cut at the page's width.
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
            // A path or a name is copied by hand and mouse: never cut one in two.
            .break_words(false)
            .word_splitter(WordSplitter::NoHyphenation)
            .word_separator(WordSeparator::AsciiSpace);
        for (at, line) in textwrap::wrap(&text, options).iter().enumerate() {
            if let Some(body) = line.strip_prefix(head).filter(|_| at == 0) {
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

/// The part of `text` that fits in `width` columns, with a sign that something was cut.
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
