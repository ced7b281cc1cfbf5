//! The data movement of the fake backend's collectives.

#![deny(clippy::wildcard_enum_match_arm)]

use super::backend::FakeOp;
use crate::arithmetic;
use crate::backend::{Done, Progress};
use crate::op::buffer::Buffer;
use crate::op::error::{Error, ErrorKind, Result};
use crate::op::{Op, Reduction};
use rcomm_recorder::model::{Layout, OpType, Parts, Pattern, Rank, ReduceOp};
use std::sync::Arc;

/// Carries out a collective for all ranks at once and ends it with the same result on each, unless a rank's
/// operation has already ended.
pub(super) fn carry_out(fake_ops: &[Arc<FakeOp>], ranks: &[Rank]) {
    if fake_ops.iter().any(|fake_op| fake_op.has_ended()) {
        return;
    }
    let ops: Option<Vec<Op<'static>>> = fake_ops
        .iter()
        .map(|fake_op| fake_op.lock().op.take())
        .collect();
    let Some(mut ops) = ops else { return };
    let result = run_all(&mut ops, ranks);
    for (fake_op, op) in fake_ops.iter().zip(ops) {
        fake_op.lock().op = Some(op);
        fake_op.end(match &result {
            Ok(()) => Progress::Completed(Done::default()),
            Err(error) => Progress::Failed(error.clone()),
        });
    }
}

/// Carries out one operation of each rank. In a coalesced block this is done for each position of the block.
///
/// # Errors
/// `Mismatch` if the ranks' operations or buffers differ.
fn run_all(ops: &mut [Op<'static>], ranks: &[Rank]) -> Result<()> {
    if let Some(Op::Coalesced(first)) = ops.first() {
        let mut columns: Vec<Vec<Op<'static>>> = first.iter().map(|_| Vec::new()).collect();
        for op in &mut *ops {
            if let Op::Coalesced(parts) = op
                && parts.len() == columns.len()
            {
                for (column, part) in columns.iter_mut().zip(parts.drain(..)) {
                    column.push(part);
                }
            } else {
                return Err(mismatch_error(ops, ranks));
            }
        }
        let result = columns
            .iter_mut()
            .try_for_each(|column| run_all(column, ranks));
        for column in columns {
            for (op, part) in ops.iter_mut().zip(column) {
                if let Op::Coalesced(parts) = op {
                    parts.push(part);
                }
            }
        }
        return result;
    }
    let keys: Vec<_> = ops.iter().map(comparison_key).collect();
    if keys.iter().any(|key| *key != keys[0]) {
        return Err(mismatch_error(ops, ranks));
    }
    move_bytes(ops).map_err(|error| {
        Error::new(
            ErrorKind::Mismatch,
            format!("the ranks' buffers differ: {error}"),
        )
    })
}

/// The properties that must be equal on all members. Types and sizes are left out where sizes may differ, and where
/// only the root has a buffer for each rank.
fn comparison_key(op: &Op<'_>) -> (OpType, Option<u32>, Option<ReduceOp>, Option<String>) {
    let kind = op.op_type();
    // Only the root has the list of all parts.
    let only_root_has_list = matches!(kind.pattern(), Pattern::Gather | Pattern::Scatter);
    let has_equal_sizes = kind.parts() == Parts::Equal && !only_root_has_list;
    let shapes = |buffers: &[Buffer<'_>]| -> Vec<_> {
        let facts = buffers.iter().map(|buffer| (buffer.dtype(), buffer.len()));
        facts.collect()
    };
    let sizes =
        has_equal_sizes.then(|| format!("{:?} {:?}", shapes(op.inputs()), shapes(op.outputs())));
    let reduction = op.reduction().map(|reduction| reduction.op);
    (op.op_type(), op.root(), reduction, sizes)
}

fn mismatch_error(ops: &[Op<'_>], ranks: &[Rank]) -> Error {
    let issued: Vec<String> = ranks
        .iter()
        .zip(ops)
        .map(|(rank, op)| format!("rank {rank}: {} {:?}", op.op_type(), op.inputs()))
        .collect();
    Error::new(
        ErrorKind::Mismatch,
        format!(
            "the ranks issued different operations: {}",
            issued.join(", ")
        ),
    )
}

fn bytes_of(buffer: &Buffer<'_>) -> Result<Vec<u8>> {
    Ok(buffer.as_bytes()?.to_vec())
}

fn write(buffer: &mut Buffer<'_>, bytes: &[u8]) -> Result<()> {
    buffer.fill(|target| {
        if target.len() != bytes.len() {
            return Err(Error::new(
                ErrorKind::Mismatch,
                format!(
                    "{} bytes do not fit a buffer of {} bytes",
                    bytes.len(),
                    target.len()
                ),
            ));
        }
        target.copy_from_slice(bytes);
        Ok(())
    })
}

/// The reduction of one input of each rank.
fn combine(inputs: &[&Buffer<'_>], reductions: &[Reduction]) -> Result<Vec<u8>> {
    let dtype = inputs[0].dtype();
    let mut parts = Vec::with_capacity(inputs.len());
    for (input, reduction) in inputs.iter().zip(reductions) {
        let mut bytes = bytes_of(input)?;
        if reduction.op == ReduceOp::PremulSum {
            arithmetic::scale(dtype, &mut bytes, reduction.host_factor()?);
        }
        parts.push(bytes);
    }
    let mut out = vec![0; parts[0].len()];
    let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
    arithmetic::combine(reductions[0].op, dtype, &parts, &mut out, None);
    Ok(out)
}

/// Part `index` of `bytes`, which consist of `parts` equal ones.
fn part(bytes: &[u8], index: usize, parts: usize) -> &[u8] {
    let len = bytes.len() / parts;
    &bytes[index * len..(index + 1) * len]
}

/// Moves and combines the data of the ranks' operations, which are all of one kind.
fn move_bytes(ops: &mut [Op<'static>]) -> Result<()> {
    let size = ops.len();
    let reductions: Vec<Reduction> = ops.iter().filter_map(Op::reduction).cloned().collect();
    // The final value of each rank's i-th output.
    let mut results: Vec<Vec<Option<Vec<u8>>>> = Vec::new();
    for rank in 0..size {
        let outputs = 0..ops[rank].outputs().len();
        let result = outputs.map(|at| output_of(ops, &reductions, rank, at));
        results.push(result.collect::<Result<_>>()?);
    }
    for (op, results) in ops.iter_mut().zip(results) {
        for (output, result) in op.outputs_mut().iter_mut().zip(results) {
            if let Some(bytes) = result {
                write(output, &bytes)?;
            }
        }
    }
    Ok(())
}

/// The final value of output `at` of `rank`; `None` if it is unchanged.
fn output_of(
    ops: &[Op<'_>],
    reductions: &[Reduction],
    rank: usize,
    at: usize,
) -> Result<Option<Vec<u8>>> {
    let size = ops.len();
    let inputs_at = |index: usize| -> Vec<&Buffer<'_>> {
        let inputs = ops.iter().map(|op| &op.inputs()[index]);
        inputs.collect()
    };
    let kind = ops[0].op_type();
    let is_list = kind.layout() == Layout::List;
    let root = ops[0].root().unwrap_or(0) as usize;
    let bytes = match kind.pattern() {
        Pattern::AllReduce => combine(&inputs_at(at), reductions)?,
        Pattern::Reduce if rank == root => combine(&inputs_at(at), reductions)?,
        Pattern::Broadcast if rank != root => bytes_of(&ops[root].inputs()[at])?,
        Pattern::AllGather | Pattern::Gather if is_list => bytes_of(&ops[at].inputs()[0])?,
        Pattern::Gather if rank != root => return Ok(None),
        Pattern::AllGather | Pattern::Gather => {
            let parts = inputs_at(at).into_iter().map(bytes_of);
            parts.collect::<Result<Vec<_>>>()?.concat()
        }
        Pattern::ReduceScatter if is_list => combine(&inputs_at(rank), reductions)?,
        Pattern::ReduceScatter => part(&combine(&inputs_at(at), reductions)?, rank, size).to_vec(),
        Pattern::AllToAll if is_list => bytes_of(&ops[at].inputs()[rank])?,
        Pattern::AllToAll if kind.has_splits() => collect_splits(ops, rank)?,
        Pattern::AllToAll => {
            let inputs = inputs_at(0).into_iter().map(bytes_of);
            let inputs = inputs.collect::<Result<Vec<_>>>()?;
            let parts = inputs.iter().map(|input| part(input, rank, size));
            parts.collect::<Vec<_>>().concat()
        }
        Pattern::Scatter if is_list => bytes_of(&ops[root].inputs()[rank])?,
        Pattern::Scatter => part(ops[root].inputs()[0].as_bytes()?, rank, size).to_vec(),
        Pattern::Reduce
        | Pattern::Broadcast
        | Pattern::Barrier
        | Pattern::Send
        | Pattern::Recv
        | Pattern::Block
        | Pattern::Agreement
        | Pattern::OneSided
        | Pattern::Unknown => return Ok(None),
    };
    Ok(Some(bytes))
}

/// The data for `rank` in an all-to-all of uneven parts.
fn collect_splits(ops: &[Op<'_>], rank: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for op in ops {
        let Some((input_splits, _)) = op.splits() else {
            continue;
        };
        let input = &op.inputs()[0];
        let element = crate::op::buffer::element_size(input.dtype());
        let before: usize = input_splits[..rank].iter().sum();
        let range = before * element..(before + input_splits[rank]) * element;
        bytes.extend_from_slice(&input.as_bytes()?[range]);
    }
    Ok(bytes)
}
