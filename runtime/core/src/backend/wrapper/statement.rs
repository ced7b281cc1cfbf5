//! A rank's statement, which describes a collective before it runs, and the comparison of all ranks' statements.

#![deny(clippy::wildcard_enum_match_arm)]

use crate::op::Op;
use crate::op::buffer::Buffer;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::{Layout, Parts, Pattern, Rank, text};
use sha2::{Digest, Sha256};

/// Bytes of a statement on the wire.
pub(super) const STATEMENT_LEN: usize = 512;
/// Bytes before the text: hash, NaN's element, NaN's input, length of the text.
const HEAD: usize = 24;
/// Bytes at the end of a statement: the length of the call site, and its text.
const SITE_LEN: usize = 128;
/// The position at which they begin.
const SITE: usize = STATEMENT_LEN - SITE_LEN;
/// The most ranks that an error names; it counts the rest.
pub(super) const MAX_NAMED: usize = 8;
/// Replaces the number of the NaN's input if there is no NaN.
const NONE: u32 = u32::MAX;

/// One rank's view of one collective, as text that is equal on ranks that agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Statement {
    /// Hash of the whole text; a message may hold only the beginning of the text.
    hash: u64,
    /// The position of the first NaN in this rank's inputs: the number of the input, and of the element.
    nan: Option<(u32, u64)>,
    /// What the ranks must agree on.
    text: String,
    /// Where the program issued the collective, as `train.py:88`; empty if unknown. Ranks may differ.
    pub(super) site: String,
}

impl Statement {
    /// The statement on `op`, the collective `seq`. `nan` is the position of a NaN in its inputs.
    pub(super) fn of(op: &Op<'_>, seq: u64, nan: Option<(u32, u64)>, site: String) -> Self {
        let text = format!("#{seq} {}", describe(op));
        let digest: [u8; 32] = Sha256::digest(text.as_bytes()).into();
        let hash = digest
            .iter()
            .take(8)
            .fold(0, |hash, &byte| hash << 8 | u64::from(byte));
        Self {
            hash,
            nan,
            text,
            site,
        }
    }

    /// The statement as it is sent: the beginning of the text, and the end of the call site, as far as there is room.
    pub(super) fn encode(&self) -> [u8; STATEMENT_LEN] {
        let mut bytes = [0; STATEMENT_LEN];
        let (input, element) = self.nan.unwrap_or((NONE, 0));
        bytes[..8].copy_from_slice(&self.hash.to_le_bytes());
        bytes[8..16].copy_from_slice(&element.to_le_bytes());
        bytes[16..20].copy_from_slice(&input.to_le_bytes());
        // The end of a path is what identifies it.
        let site = self.site.as_bytes();
        let site = &site[site.len().saturating_sub(SITE_LEN - 1)..];
        bytes[SITE] = site.len() as u8;
        bytes[SITE + 1..][..site.len()].copy_from_slice(site);
        let text = self.text.as_bytes();
        let len = text.len().min(SITE - HEAD);
        bytes[20..24].copy_from_slice(&(len as u32).to_le_bytes());
        bytes[HEAD..HEAD + len].copy_from_slice(&text[..len]);
        bytes
    }

    /// Reads what [`encode`](Self::encode) wrote; `None` if the bytes are no statement.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let u32_at = |at: usize| -> Option<u32> {
            Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
        };
        let u64_at = |at: usize| Some(u64::from(u32_at(at)?) | u64::from(u32_at(at + 4)?) << 32);
        let len = u32_at(20)? as usize;
        let text = bytes.get(HEAD..HEAD.checked_add(len)?)?;
        let input = u32_at(16)?;
        let site = bytes.get(SITE..STATEMENT_LEN)?;
        let site = site.get(1..1 + usize::from(site[0]))?;
        Some(Self {
            hash: u64_at(0)?,
            nan: (input != NONE).then_some((input, u64_at(8)?)),
            text: String::from_utf8_lossy(text).into_owned(),
            site: String::from_utf8_lossy(site).into_owned(),
        })
    }
}

/// The properties that must be equal on all members, as text. Sizes that may differ from rank to rank are
/// left out.
fn describe(op: &Op<'_>) -> String {
    let kind = op.op_type();
    let reduction = match op.reduction().map(|reduction| reduction.op) {
        Some(op) => format!("({op})"),
        None => String::new(),
    };
    let buffers = if let Op::Coalesced(ops) = op {
        let ops: Vec<String> = ops.iter().map(describe).collect();
        format!(" [{}]", ops.join("; "))
    } else {
        agreed_buffers(op)
    };
    let root = match op.root() {
        Some(root) => format!(" with root {root}"),
        None => String::new(),
    };
    format!("{kind}{reduction}{buffers}{root}")
}

/// The buffers whose types and sizes all members must agree on; where sizes may differ, the type.
fn agreed_buffers(op: &Op<'_>) -> String {
    let kind = op.op_type();
    let to_text = |buffers: &[Buffer<'_>]| match buffers {
        [buffer] if kind.layout() != Layout::Several => format!("{buffer:?}"),
        _ => format!("{buffers:?}"),
    };
    let type_text = |buffers: &[Buffer<'_>]| {
        let dtype = buffers.first().map(Buffer::dtype);
        dtype.map_or_else(String::new, |dtype| format!(" of {dtype}"))
    };
    let (inputs, outputs) = (op.inputs(), op.outputs());
    let is_equal = kind.parts() == Parts::Equal;
    match kind.pattern() {
        Pattern::AllReduce | Pattern::Reduce | Pattern::Broadcast => {
            format!(" of {}", to_text(inputs))
        }
        Pattern::AllGather if is_equal => format!(" of {}", to_text(inputs)),
        // All members have the list of all parts.
        Pattern::AllGather => format!(" into {outputs:?}"),
        Pattern::ReduceScatter if !is_equal => format!(" of {inputs:?}"),
        Pattern::ReduceScatter if kind.layout() == Layout::List => {
            format!(" into {}", to_text(outputs))
        }
        Pattern::ReduceScatter => format!(" of {}", to_text(inputs)),
        Pattern::AllToAll | Pattern::Gather if is_equal => format!(" of {}", to_text(inputs)),
        Pattern::AllToAll | Pattern::Gather => type_text(inputs),
        Pattern::Scatter if is_equal => format!(" into {}", to_text(outputs)),
        Pattern::Scatter => type_text(outputs),
        Pattern::Barrier
        | Pattern::Send
        | Pattern::Recv
        | Pattern::Block
        | Pattern::Agreement
        | Pattern::OneSided
        | Pattern::Unknown => String::new(),
    }
}

/// Fails, with the same message on all ranks, unless all statements are equal and without a NaN. Returns where
/// each rank issued the operation.
///
/// `statements` holds the statements of the group's ranks, one after the other; `ranks` holds their ranks in the
/// world.
///
/// # Errors
/// `Mismatch` if statements differ; otherwise `NotANumber` names the first rank with a NaN. `Backend` if the bytes of a
/// rank are no statement.
pub(super) fn compare(statements: &[u8], ranks: &[Rank]) -> Result<Vec<String>> {
    let mut sites = Vec::with_capacity(ranks.len());
    let mut sets: Vec<(Statement, Vec<Rank>)> = Vec::new();
    let mut first_nan = None;
    for (bytes, &rank) in statements.chunks_exact(STATEMENT_LEN).zip(ranks) {
        let statement = Statement::decode(bytes).ok_or_else(|| {
            let message = format!(
                "rank {rank} sent bytes that cannot be read as a statement of its operation"
            );
            Error::new(ErrorKind::Backend, message).with_rank(rank)
        })?;
        if first_nan.is_none() {
            first_nan = statement.nan.map(|position| (rank, position));
        }
        sites.push(statement.site.clone());
        match sets
            .iter_mut()
            .find(|(other, _)| other.hash == statement.hash)
        {
            Some((_, set)) => set.push(rank),
            None => sets.push((statement, vec![rank])),
        }
    }
    if sets.len() > 1 {
        return Err(disagreement(sets));
    }
    match (first_nan, sets.first()) {
        (Some((rank, (input, element))), Some((statement, _))) => Err(Error::new(
            ErrorKind::NotANumber,
            format!(
                "rank {rank} passed a NaN: element {element} of input {input} of {}",
                statement.text
            ),
        )
        .with_rank(rank)),
        _ => Ok(sites),
    }
}

/// The error of ranks whose statements differ. The largest set of equal statements is presumed right; of sets of
/// equal size, the one with the lowest rank. The error is about the first of the other ranks; its
/// text names the sets.
fn disagreement(mut sets: Vec<(Statement, Vec<Rank>)>) -> Error {
    let mut largest = 0;
    for index in 1..sets.len() {
        if sets[index].1.len() > sets[largest].1.len() {
            largest = index;
        }
    }
    // A call site that all ranks share is left out.
    let is_one_site = sets
        .iter()
        .all(|(statement, _)| statement.site == sets[0].0.site);
    let shown = |statement: &Statement| match (is_one_site, statement.site.as_str()) {
        (true, _) | (_, "") => statement.text.clone(),
        (false, site) => format!("{} at {site}", statement.text),
    };
    let (usual, majority) = sets.remove(largest);
    let more = sets.len().saturating_sub(MAX_NAMED);
    let culprit = sets.first().and_then(|(_, ranks)| ranks.first().copied());
    let others: Vec<String> = sets
        .iter()
        .take(MAX_NAMED)
        .map(|(statement, ranks)| {
            format!(
                "{} issued {}",
                text::ranks(ranks, MAX_NAMED),
                shown(statement)
            )
        })
        .collect();
    let more = match more {
        0 => String::new(),
        1 => ", and 1 more statement".to_owned(),
        more => format!(", and {more} more statements"),
    };
    let error = Error::new(
        ErrorKind::Mismatch,
        format!(
            "the ranks disagree: {}{more}, but {} issued {}",
            others.join(", "),
            text::ranks(&majority, MAX_NAMED),
            shown(&usual)
        ),
    );
    match culprit {
        Some(rank) => error.with_rank(rank),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Reduction;
    use proptest::prelude::*;
    use rcomm_recorder::model::ReduceOp;

    fn all_reduce(len: usize, op: ReduceOp) -> Statement {
        let op = Op::AllReduce {
            buffer: Buffer::from_vec(vec![0f32; len]),
            op: op.into(),
        };
        Statement::of(&op, 4, None, String::new())
    }

    fn compared(statements: &[Statement]) -> Result<Vec<String>> {
        let encoded: Vec<u8> = statements.iter().flat_map(Statement::encode).collect();
        let ranks: Vec<Rank> = (10..).take(statements.len()).collect();
        compare(&encoded, &ranks)
    }

    #[test]
    fn ranks_that_differ_are_named_with_what_they_issued() {
        let (usual, short) = (all_reduce(4, ReduceOp::Sum), all_reduce(3, ReduceOp::Sum));
        let max = all_reduce(4, ReduceOp::Max);
        assert!(compared(&[usual.clone(), usual.clone()]).is_ok());
        let error = compared(&[short, usual.clone(), max, usual]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert_eq!(error.rank(), Some(10));
        assert_eq!(
            error.to_string(),
            "the ranks disagree: rank 10 issued #4 all_reduce(sum) of Float[3], \
             rank 12 issued #4 all_reduce(max) of Float[4], \
             but ranks 11, 13 issued #4 all_reduce(sum) of Float[4]"
        );
    }

    #[test]
    fn a_call_site_is_named_and_may_differ_between_ranks() {
        let with_site = |mut statement: Statement, site: &str| {
            statement.site = site.to_owned();
            statement
        };
        let usual = || all_reduce(4, ReduceOp::Sum);
        let long_site = format!("{}/train.py:88", "x".repeat(300));
        let sites = compared(&[
            with_site(usual(), "a.py:1"),
            with_site(usual(), &long_site),
            usual(),
        ])
        .unwrap();
        assert_eq!((sites[0].as_str(), sites[2].as_str()), ("a.py:1", ""));
        assert!(sites[1].ends_with("x/train.py:88") && sites[1].len() < SITE_LEN);
        let error = compared(&[
            with_site(all_reduce(3, ReduceOp::Sum), "a.py:1"),
            usual(),
            usual(),
        ])
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "the ranks disagree: rank 10 issued #4 all_reduce(sum) of Float[3] at a.py:1, \
             but ranks 11, 12 issued #4 all_reduce(sum) of Float[4]"
        );
    }

    #[test]
    fn statements_that_differ_beyond_the_text_that_is_sent_are_found() {
        let block = |last: usize| {
            let mut lens = vec![1; 400];
            lens.push(last);
            let buffers = lens
                .iter()
                .map(|&len| Buffer::from_vec(vec![0u8; len]))
                .collect();
            let op = ReduceOp::Sum.into();
            Statement::of(
                &Op::AllReduceCoalesced { buffers, op },
                1,
                None,
                String::new(),
            )
        };
        assert!(compared(&[block(1), block(1)]).is_ok());
        assert!(compared(&[block(1), block(2)]).is_err());
    }

    #[test]
    fn each_operation_is_described_by_what_must_agree_on_all_members() {
        let floats = |len: usize| Buffer::from_vec(vec![0f32; len]);
        let list = |lens: &[usize]| lens.iter().map(|&len| floats(len)).collect::<Vec<_>>();
        let (op, root) = (|| Reduction::from(ReduceOp::Sum), 1);
        let (input, output) = (|| floats(2), || floats(4));
        let (even, uneven) = (|| list(&[2, 2]), || list(&[2, 3]));
        let (splits, back) = (vec![1, 1], vec![2, 2]);
        let described: Vec<String> = [
            Op::AllReduce {
                buffer: input(),
                op: op(),
            },
            Op::AllReduceCoalesced {
                buffers: list(&[2]),
                op: op(),
            },
            Op::Reduce {
                buffer: input(),
                op: op(),
                root,
            },
            Op::Broadcast {
                buffer: input(),
                root,
            },
            Op::Barrier,
            Op::AllGather {
                input: input(),
                outputs: even(),
            },
            Op::AllGatherSingle {
                input: input(),
                output: output(),
            },
            Op::AllGatherV {
                input: input(),
                outputs: uneven(),
            },
            Op::AllGatherCoalesced {
                inputs: list(&[2]),
                outputs: list(&[4]),
            },
            Op::ReduceScatter {
                inputs: even(),
                output: input(),
                op: op(),
            },
            Op::ReduceScatterSingle {
                input: output(),
                output: input(),
                op: op(),
            },
            Op::ReduceScatterV {
                inputs: uneven(),
                output: input(),
                op: op(),
            },
            Op::ReduceScatterCoalesced {
                inputs: list(&[4]),
                outputs: list(&[2]),
                op: op(),
            },
            Op::AllToAll {
                inputs: even(),
                outputs: uneven(),
            },
            Op::AllToAllSingle {
                input: output(),
                output: output(),
            },
            Op::AllToAllVSingle {
                input: input(),
                output: output(),
                input_splits: splits,
                output_splits: back,
            },
            Op::Gather {
                input: input(),
                outputs: vec![],
                root,
            },
            Op::GatherV {
                input: input(),
                outputs: vec![],
                root,
            },
            Op::Scatter {
                inputs: vec![],
                output: input(),
                root,
            },
            Op::ScatterV {
                inputs: vec![],
                output: input(),
                root,
            },
            Op::Coalesced(vec![
                Op::Barrier,
                Op::Broadcast {
                    buffer: input(),
                    root: 0,
                },
            ]),
        ]
        .iter()
        .map(describe)
        .collect();
        assert_eq!(
            described,
            [
                "all_reduce(sum) of Float[2]",
                "all_reduce_coalesced(sum) of [Float[2]]",
                "reduce(sum) of Float[2] with root 1",
                "broadcast of Float[2] with root 1",
                "barrier",
                "all_gather of Float[2]",
                "all_gather_single of Float[2]",
                "all_gather_v into [Float[2], Float[3]]",
                "all_gather_coalesced of [Float[2]]",
                "reduce_scatter(sum) into Float[2]",
                "reduce_scatter_single(sum) of Float[4]",
                "reduce_scatter_v(sum) of [Float[2], Float[3]]",
                "reduce_scatter_coalesced(sum) of [Float[4]]",
                "all_to_all of Float",
                "all_to_all_single of Float[4]",
                "all_to_all_v_single of Float",
                "gather of Float[2] with root 1",
                "gather_v of Float with root 1",
                "scatter into Float[2] with root 1",
                "scatter_v of Float with root 1",
                "coalesced [barrier; broadcast of Float[2] with root 0]",
            ]
        );
    }

    #[test]
    fn sizes_that_may_differ_are_not_compared() {
        let gather = |len: usize| {
            let input = Buffer::from_vec(vec![0i64; len]);
            let (outputs, root) = (Vec::new(), 0);
            Statement::of(
                &Op::GatherV {
                    input,
                    outputs,
                    root,
                },
                1,
                None,
                String::new(),
            )
        };
        assert!(compared(&[gather(1), gather(5)]).is_ok());
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_statement_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 2 * STATEMENT_LEN)) {
            // Any result is accepted: the call must not panic.
            let _ = compare(&bytes, &[0, 1]);
        }
    }
}
