//! Prints codes and their explanations as text.

use super::page::{ACT, ALARM, CAUTION, DIM, Layout, PLAIN, Page};
use rcomm_verdict::{Code, Explanation, Severity};
use std::io::{self, Write};

/// Writes the explanation of one code.
///
/// # Errors
/// If `out` cannot be written to.
pub fn write_explanation(
    explanation: &Explanation,
    layout: &Layout,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut page = Page::new(layout, out);
    let code = explanation.code;
    page.headline(
        &format!("{code} {}", code.name()),
        style_of(code.severity()),
        code.meaning(),
    )?;
    page.blank()?;
    page.plain(PLAIN, explanation.meaning)?;
    page.blank()?;
    page.plain(ACT, "Where it usually comes from")?;
    for cause in explanation.causes {
        page.bullet(cause)?;
    }
    page.blank()?;
    page.plain(ACT, "What to do")?;
    for action in explanation.actions {
        page.bullet(action)?;
    }
    Ok(())
}

/// Writes all codes, one per line.
///
/// # Errors
/// If `out` cannot be written to.
pub fn write_codes(layout: &Layout, out: &mut dyn Write) -> io::Result<()> {
    let mut page = Page::new(layout, out);
    for &code in Code::ALL {
        page.headline(
            &format!("{code} {:20}", code.name()),
            style_of(code.severity()),
            code.meaning(),
        )?;
    }
    page.blank()?;
    page.plain(
        DIM,
        "E = error, W = warning, N = note. A healthy job has no E and no W.",
    )
}

const fn style_of(severity: Severity) -> anstyle::Style {
    match severity {
        Severity::Error => ALARM,
        Severity::Warning => CAUTION,
        Severity::Note => DIM,
    }
}
