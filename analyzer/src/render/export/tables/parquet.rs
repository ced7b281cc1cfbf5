//! Writes a data frame as Parquet.
//!
//! The writer of polars-io, which polars offers for this, would link the compressors of every algorithm that Parquet
//! knows, some of them in C. All readers of Parquet know the only one that is used here.

use polars::prelude::{ArrowSchema, CompatLevel, DataFrame, PolarsResult, SchemaExt};
use polars_parquet::write::{
    CompressionOptions, FileWriter, StatisticsOptions, Version, WriteOptions, get_dtype_encoding,
    row_group_iter,
};
use std::io::Write;

/// Maximum number of rows of a row group.
const ROWS: usize = 1 << 18;

/// Writes the table, in row groups of at most [`ROWS`] rows.
pub(super) fn write(table: &DataFrame, to: impl Write) -> PolarsResult<()> {
    let fields = table.schema().iter_fields();
    let schema: ArrowSchema = fields
        .map(|field| {
            let arrow = field.to_arrow(CompatLevel::newest());
            (field.name, arrow)
        })
        .collect();
    let encodings = schema.iter_values();
    let encodings: Vec<_> = encodings
        .map(|field| get_dtype_encoding(&field.dtype))
        .collect();
    let options = WriteOptions {
        statistics: StatisticsOptions::default(),
        version: Version::V1,
        compression: CompressionOptions::Snappy,
        data_page_size: None,
    };
    let mut writer = FileWriter::try_new(to, schema, options)?;
    let columns = writer.parquet_schema().fields().to_vec();
    for first in (0..table.height()).step_by(ROWS) {
        let mut rows = table.slice(first as i64, ROWS);
        rows.rechunk_mut();
        for group in rows.iter_chunks(CompatLevel::newest(), false) {
            let len = group.len() as u64;
            let group = row_group_iter(group, encodings.clone().into(), columns.clone(), options);
            writer.write(len, group)?;
        }
    }
    writer.end(None)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use polars::df;
    use polars_parquet::read::read_metadata;
    use std::io::Cursor;

    #[test]
    fn tables_of_any_height_become_row_groups_of_limited_size() {
        for height in [0, 1, ROWS, ROWS + 1] {
            let numbers: Vec<_> = (0..height as i64).collect();
            let texts: Vec<_> = (0..height)
                .map(|row| (row % 3 > 0).then_some("all_reduce"))
                .collect();
            let table = df!("number" => numbers, "text" => texts).expect("equal lengths");
            let mut file = Cursor::new(Vec::new());
            write(&table, &mut file).expect("writing to memory does not fail");
            let written = read_metadata(&mut file).expect("the file can be read");
            assert_eq!(written.num_rows, height);
            let groups: Vec<_> = written.row_groups.iter().map(|it| it.num_rows()).collect();
            let expected = [
                vec![ROWS; height / ROWS],
                vec![height % ROWS; usize::from(height % ROWS > 0)],
            ];
            assert_eq!(groups, expected.concat());
        }
    }
}
