//! Prints one rank's record as text: identity, groups, pending and newest operations.

use super::page::{DIM, Detail, Layout, PLAIN, Page};
use super::tables::{table, tail_of};
use crate::render::state_name;
use rcomm_recorder::model::{Entry, EntryState};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::format::{Ranks, bytes, count, duration_ms, group_label};
use rcomm_verdict::{GroupRef, seq_of, status_entry};
use std::io::{self, Write};

/// A brief page shows at most this many of the newest operations.
const BRIEF_NEWEST: usize = 8;

/// Writes the record. Ages are relative to the time when it was taken.
///
/// # Errors
/// If `out` cannot be written to.
pub fn write_record(dump: &Dump, layout: &Layout, out: &mut dyn Write) -> io::Result<()> {
    let mut page = Page::new(layout, out);
    let identity = &dump.identity;
    let mut title = match (identity.rank, identity.world_size) {
        (Some(rank), Some(size)) => format!("rank {rank} of {size}"),
        (Some(rank), None) => format!("rank {rank}"),
        (None, _) => "unknown rank".to_owned(),
    };
    for (key, text) in [("job", &identity.job), ("host", &identity.host)] {
        if !text.is_empty() {
            title += &format!(", {key} {text}");
        }
    }
    if identity.pid != 0 {
        title += &format!(", pid {}", identity.pid);
    }
    title += &format!(", attempt {}", identity.attempt);
    page.plain(PLAIN, &title)?;
    let now = identity.dump_time_ns;
    if let Some(status) = &dump.status {
        if !status.phase.is_empty() {
            let text = format!("{}{}", status.phase, since(now, status.phase_since_ns));
            page.item("phase", PLAIN, &text)?;
        }
        if status.step >= 0 {
            page.item("step", PLAIN, &status.step.to_string())?;
        }
        if status.dropped > 0 {
            let text = count(status.dropped, "record");
            page.item("dropped", PLAIN, &format!("{text} could not be kept"))?;
        }
    }
    let number_of = |last: i64| match last {
        0.. => format!("#{last}"),
        _ => "none".to_owned(),
    };
    page.items(
        "groups",
        dump.groups.iter().enumerate().map(|(index, group)| {
            let label = label_of(dump, index);
            let ranks = Ranks(&group.info.ranks).to_string();
            match &group.status {
                Some(status) => format!(
                    "{label} of {ranks}: issued {}, started {}, completed {}",
                    number_of(status.last_enqueued),
                    number_of(status.last_started),
                    number_of(status.last_completed)
                ),
                None => format!("{label} of {ranks}"),
            }
        }),
    )?;

    let pending: Vec<&Entry> = dump
        .entries
        .iter()
        .filter(|entry| {
            let status = status_entry(dump, entry);
            status.state < EntryState::Completed && !status.retired
        })
        .collect();
    let shown = match layout.detail {
        Detail::Brief => BRIEF_NEWEST,
        Detail::Verbose => usize::MAX,
    };
    write_operations("pending, oldest first", &pending, dump, &mut page)?;
    let newest: Vec<&Entry> = dump.entries.iter().rev().take(shown).collect();
    write_operations("newest operations", &newest, dump, &mut page)?;
    if dump.entries.is_empty() {
        page.plain(DIM, "no operation was recorded")?;
    }
    Ok(())
}

fn label_of(dump: &Dump, group: usize) -> String {
    dump.groups.get(group).map_or_else(
        || "unknown group".to_owned(),
        |group| {
            group_label(&GroupRef {
                name: group.info.name.clone(),
                desc: group.info.desc.clone(),
                ranks: [].into(),
            })
        },
    )
}

/// How long ago `then` was, as a part of a sentence like `, for 12 s`; empty if one of the times is unknown.
fn since(now: i64, then: i64) -> String {
    if now <= 0 || then <= 0 {
        return String::new();
    }
    format!(", for {}", duration_ms((now - then) as f64 / 1e6))
}

fn write_operations(
    name: &str,
    entries: &[&Entry],
    dump: &Dump,
    page: &mut Page<'_>,
) -> io::Result<()> {
    let now = dump.identity.dump_time_ns;
    let rows = entries.iter().map(|entry| {
        let signature = dump.signatures.get(entry.signature as usize);
        let age = match (now, entry.time_created_ns) {
            (1.., 1..) => duration_ms((now - entry.time_created_ns) as f64 / 1e6),
            _ => "-".to_owned(),
        };
        let seq = seq_of(entry);
        let state = match (entry.graph_id, entry.state) {
            // A captured operation runs when its graph is launched, which the record does not show.
            (Some(graph), _) => format!("in graph {graph}"),
            (None, state) => state_name(state).to_owned(),
        };
        let call_site = entry
            .stack
            .and_then(|stack| dump.stacks.get(stack as usize)?.first())
            .and_then(|&frame| dump.frames.get(frame as usize))
            .map_or_else(String::new, |frame| {
                format!("{}:{}", tail_of(&frame.filename), frame.line)
            });
        vec![
            entry.record_id.to_string(),
            age,
            signature.map_or_else(
                || entry.op.name().to_owned(),
                |signature| signature.op_name.clone(),
            ),
            format!("#{seq}"),
            label_of(dump, entry.group as usize),
            signature.map_or_else(String::new, |signature| bytes(signature.input_bytes())),
            state,
            call_site,
        ]
    });
    table(
        name,
        &[
            "record",
            "age",
            "operation",
            "seq",
            "group",
            "bytes",
            "state",
            "at",
        ],
        rows,
        page,
    )
}
