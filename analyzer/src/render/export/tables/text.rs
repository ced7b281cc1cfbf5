//! Writes a table as text with all rows; columns are as wide as their widest cell.

use super::TableError;
use polars::prelude::{AnyValue, Column, DataFrame};
use rcomm_verdict::format::printable;
use std::borrow::Cow;
use std::io::{self, Write};
use textwrap::core::display_width;

pub(super) fn write(table: &DataFrame, to: &mut impl Write) -> Result<(), TableError> {
    let columns = table.columns();
    let mut widths: Vec<usize> = columns
        .iter()
        .map(|column| display_width(&printable(column.name())))
        .collect();
    for row in 0..table.height() {
        for (column, width) in columns.iter().zip(&mut widths) {
            *width = (*width).max(display_width(&cell(column, row)?));
        }
    }
    let heads = columns.iter().map(|column| Ok(printable(column.name())));
    line(columns, &widths, heads, to)?;
    for row in 0..table.height() {
        let cells = columns.iter().map(|column| cell(column, row));
        line(columns, &widths, cells, to)?;
    }
    Ok(())
}

/// The text of a cell; `-` for null.
fn cell(column: &Column, row: usize) -> Result<Cow<'_, str>, TableError> {
    Ok(match column.get(row)? {
        AnyValue::Null => Cow::Borrowed("-"),
        AnyValue::Boolean(true) => Cow::Borrowed("yes"),
        AnyValue::Boolean(false) => Cow::Borrowed("no"),
        AnyValue::String(text) => printable(text),
        other => Cow::Owned(printable(&other.str_value()).into_owned()),
    })
}

/// Writes a row: two spaces between columns, numbers aligned to the right, no spaces at the end.
fn line<'a>(
    columns: &[Column],
    widths: &[usize],
    cells: impl Iterator<Item = Result<Cow<'a, str>, TableError>>,
    to: &mut impl Write,
) -> Result<(), TableError> {
    let mut text = String::new();
    for ((column, &width), cell) in columns.iter().zip(widths).zip(cells) {
        let cell = cell?;
        if !text.is_empty() {
            text.push_str("  ");
        }
        let blanks = width.saturating_sub(display_width(&cell));
        let blanks = std::iter::repeat_n(' ', blanks);
        if column.dtype().is_primitive_numeric() {
            text.extend(blanks);
            text.push_str(&cell);
        } else {
            text.push_str(&cell);
            text.extend(blanks);
        }
    }
    writeln!(to, "{}", text.trim_end()).map_err(write_error)
}

fn write_error(error: io::Error) -> TableError {
    TableError::Polars(error.into())
}
