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
pub(super) mod tests {
    use super::*;
    use polars::prelude::{Column, Field, Series};
    use polars_parquet::read::{
        BasicDecompressor, column_iter_to_arrays, get_page_iterator, infer_schema, read_metadata,
    };
    use std::io::Cursor;

    /// Reads a file of flat columns.
    ///
    /// Returns the table, and the number of rows of each row group.
    pub(in super::super) fn read(file: Vec<u8>) -> PolarsResult<(DataFrame, Vec<usize>)> {
        let metadata = read_metadata(&mut Cursor::new(&file))?;
        let schema = infer_schema(&metadata)?;
        let file = Cursor::new(file.into());
        let columns = schema.iter_values().map(|field| {
            let mut read = Series::new_empty(field.name.clone(), &Field::from(field).dtype);
            for group in &metadata.row_groups {
                for column in group
                    .columns_under_root_iter(&field.name)
                    .into_iter()
                    .flatten()
                {
                    let pages = get_page_iterator(column, file.clone(), vec![], usize::MAX)?;
                    let (arrays, _) = column_iter_to_arrays(
                        vec![BasicDecompressor::new(pages, vec![])],
                        vec![&column.descriptor().descriptor.primitive_type],
                        field.clone(),
                        None,
                    )?;
                    read.append(&Series::from_arrow_chunks(field.name.clone(), arrays)?)?;
                }
            }
            Ok(Column::from(read))
        });
        let columns = columns.collect::<PolarsResult<_>>()?;
        let groups = metadata.row_groups.iter().map(|it| it.num_rows());
        Ok((
            DataFrame::new(metadata.num_rows, columns)?,
            groups.collect(),
        ))
    }

    #[test]
    fn tables_of_any_height_are_read_back_from_row_groups_of_limited_size() {
        for height in [0, 1, ROWS, ROWS + 1] {
            let rows = 0..height as i64;
            let table = DataFrame::new(
                height,
                vec![
                    Column::new("number".into(), rows.clone().collect::<Vec<_>>()),
                    Column::new(
                        "text".into(),
                        rows.clone()
                            .map(|row| (row % 3 > 0).then(|| format!("all_reduce {}", row % 7)))
                            .collect::<Vec<_>>(),
                    ),
                    Column::new(
                        "single".into(),
                        rows.clone()
                            .map(|row| (row % 5 > 0).then_some(row as f32 / 3.0))
                            .collect::<Vec<_>>(),
                    ),
                    Column::new(
                        "double".into(),
                        rows.clone()
                            .map(|row| -(row as f64) / 3.0)
                            .collect::<Vec<_>>(),
                    ),
                    Column::new(
                        "truth".into(),
                        rows.clone()
                            .map(|row| (row % 4 > 0).then_some(row % 2 > 0))
                            .collect::<Vec<_>>(),
                    ),
                    Column::new(
                        "nothing".into(),
                        rows.map(|_| None::<i64>).collect::<Vec<_>>(),
                    ),
                ],
            )
            .expect("all columns are equally long");
            let mut file = Vec::new();
            write(&table, &mut file).expect("writing to memory does not fail");
            let (read, groups) = read(file).expect("the file can be read");
            assert!(read.equals_missing(&table), "{read} in place of {table}");
            assert_eq!(read.schema(), table.schema());
            let expected = [
                vec![ROWS; height / ROWS],
                vec![height % ROWS; usize::from(height % ROWS > 0)],
            ];
            assert_eq!(groups, expected.concat());
        }
    }
}
