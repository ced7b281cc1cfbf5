//! The arguments in which the members of a group must agree, computed once for each distinct call.
//!
//! Two records of one collective are compared by their [`MatchKey`]s. A field is `None` if the operation allows it to
//! differ or the record does not hold it.

use hashbrown::{DefaultHashBuilder, HashTable};
use rcomm_recorder::model::{Layout, OpType, Parts, Pattern, ReduceOp, Signature};
use std::hash::BuildHasher;

/// The kind of operation that a call performs on the wire; calls of different kinds cannot match.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum OpClass {
    /// A known operation. The variants of an operation, such as those of all-gather, share its class; a variant that
    /// makes several tensors one operation has a class of its own.
    Known(OpType),
    /// An unknown operation, by the hash of its name.
    Named(u64),
}

/// The arguments that must be equal on all members.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct MatchKey {
    pub(crate) class: OpClass,
    /// The element types, as a hash of their names.
    pub(crate) dtype: Option<u64>,
    /// Elements, or bytes if the type may differ.
    pub(crate) size: Option<u64>,
    /// A hash of the numbers of elements of each tensor, for an all-reduce of several.
    pub(crate) tensors: Option<u64>,
    /// The root, if recorded.
    pub(crate) root: Option<u32>,
    /// The reduction, if recorded.
    pub(crate) reduce_op: Option<ReduceOp>,
}

/// How two members' calls of one collective differ, the most severe first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum CallDifference {
    Op,
    Dtype,
    /// The numbers of elements or, of a broadcast, of bytes.
    Size,
    /// The root or the reduction.
    Argument,
}

impl MatchKey {
    /// The most severe difference between two members, if there is one.
    pub(crate) fn difference(&self, other: &Self) -> Option<CallDifference> {
        fn differ<T: PartialEq>(a: &Option<T>, b: &Option<T>) -> bool {
            matches!((a, b), (Some(a), Some(b)) if a != b)
        }
        if self.class != other.class {
            Some(CallDifference::Op)
        } else if differ(&self.dtype, &other.dtype) {
            Some(CallDifference::Dtype)
        } else if differ(&self.size, &other.size) || differ(&self.tensors, &other.tensors) {
            Some(CallDifference::Size)
        } else if differ(&self.root, &other.root) || differ(&self.reduce_op, &other.reduce_op) {
            Some(CallDifference::Argument)
        } else {
            None
        }
    }
}

/// A signature with the arguments of one call, shared by all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    pub(crate) op: OpType,
    pub(crate) signature: Signature,
    pub(crate) root: Option<u32>,
    pub(crate) reduce_op: Option<ReduceOp>,
    pub(crate) timeout_ms: u64,
}

/// A [`Call`] whose signature is borrowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CallRef<'a> {
    pub(crate) op: OpType,
    pub(crate) signature: &'a Signature,
    pub(crate) root: Option<u32>,
    pub(crate) reduce_op: Option<ReduceOp>,
    pub(crate) timeout_ms: u64,
}

impl CallRef<'_> {
    fn to_call(self) -> Call {
        Call {
            op: self.op,
            signature: self.signature.clone(),
            root: self.root,
            reduce_op: self.reduce_op,
            timeout_ms: self.timeout_ms,
        }
    }
}

impl Call {
    pub(crate) fn as_ref(&self) -> CallRef<'_> {
        CallRef {
            op: self.op,
            signature: &self.signature,
            root: self.root,
            reduce_op: self.reduce_op,
            timeout_ms: self.timeout_ms,
        }
    }

    /// The operation as findings spell it: rcomm's name, or the recorder's if it is unknown.
    pub(crate) fn op_name(&self) -> &str {
        if self.signature.op_name.is_empty() || self.op != OpType::Other {
            self.op.name()
        } else {
            &self.signature.op_name
        }
    }

    /// The kind of collectives that a marker closes, as PyTorch's recorder names it (`ALLGATHER_coalesced`); `None` if
    /// it is no such marker, or names none.
    fn block_name(&self) -> Option<&str> {
        let name = self.signature.op_name.as_str();
        let is_named = self.op == OpType::Coalesced && name.len() > self.op.name().len();
        is_named.then_some(name)
    }

    /// The operation with its relevant arguments, like `all_reduce [64] Float`. If the tensors of the output have
    /// different shapes, or may have them, these shapes follow: `all_gather [5] into [2] [5] [9] Float`.
    pub(crate) fn describe(&self) -> String {
        let Signature {
            input_sizes,
            output_sizes,
            input_dtypes,
            output_dtypes,
            ..
        } = &self.signature;
        let (sizes, dtypes) = if input_sizes.is_empty() {
            (output_sizes, output_dtypes)
        } else {
            (input_sizes, input_dtypes)
        };
        let mut text = self.block_name().unwrap_or(self.op_name()).to_owned();
        describe_shapes(sizes, &mut text);
        let uneven = output_sizes.windows(2).any(|pair| pair[0] != pair[1]);
        if !input_sizes.is_empty() && (uneven || self.op == OpType::AllGatherV) {
            text.push_str(" into");
            describe_shapes(output_sizes, &mut text);
        }
        if let Some(dtype) = dtypes.first() {
            text.push(' ');
            text.push_str(dtype);
        }
        if let Some(root) = self.root {
            text.push_str(&format!(" root {root}"));
        }
        if let Some(reduce_op) = self.reduce_op {
            text.push_str(&format!(" {reduce_op}"));
        }
        text
    }

    /// The bytes of the input or of the output, whichever is larger.
    pub(crate) fn bytes(&self) -> u64 {
        self.signature
            .input_bytes()
            .max(self.signature.output_bytes())
    }

    /// The arguments by which this call is compared with those of other members.
    fn match_key(&self) -> MatchKey {
        if self.op == OpType::Other {
            return MatchKey {
                class: OpClass::Named(hash_of(&self.signature.op_name)),
                dtype: None,
                size: None,
                tensors: None,
                root: None,
                reduce_op: None,
            };
        }
        let signature = &self.signature;
        let inputs = || (!signature.input_sizes.is_empty()).then(|| signature.input_elements());
        let outputs = || (!signature.output_sizes.is_empty()).then(|| signature.output_elements());
        let either = || inputs().or_else(outputs);
        let in_dtype =
            || dtypes(&signature.input_dtypes).or_else(|| dtypes(&signature.output_dtypes));
        let out_dtype =
            || dtypes(&signature.output_dtypes).or_else(|| dtypes(&signature.input_dtypes));
        let (base, dtype, size) = match self.op.pattern() {
            Pattern::AllReduce | Pattern::Reduce | Pattern::Send | Pattern::Recv => {
                (self.op, in_dtype(), either())
            }
            // A broadcast moves bytes: types of one size may be mixed.
            Pattern::Broadcast => {
                let bytes = if signature.input_sizes.is_empty() {
                    signature.output_bytes()
                } else {
                    signature.input_bytes()
                };
                (self.op, None, either().map(|_| bytes))
            }
            Pattern::AllGather => (OpType::AllGather, in_dtype(), outputs()),
            Pattern::ReduceScatter => (OpType::ReduceScatter, in_dtype(), inputs()),
            // Recorders write exchanges of even and of uneven parts under one name.
            Pattern::AllToAll => (OpType::AllToAll, in_dtype(), None),
            Pattern::Gather => (OpType::Gather, in_dtype(), inputs()),
            Pattern::Scatter => (OpType::Scatter, out_dtype(), outputs()),
            Pattern::Barrier => (OpType::Barrier, None, None),
            Pattern::Block | Pattern::Agreement | Pattern::OneSided | Pattern::Unknown => {
                (self.op, None, None)
            }
        };
        // Several tensors are another operation on the wire than one tensor of their total length.
        let is_several = self.op.layout() == Layout::Several;
        let class = if is_several { self.op } else { base };
        let has_one_length = match (self.op.pattern(), self.op.parts()) {
            // Every member has the list of all parts, so its length is equal everywhere.
            (Pattern::AllGather | Pattern::ReduceScatter, _) | (_, Parts::Equal) => true,
            (_, Parts::PerRank | Parts::PerPair) => false,
        };
        let size = size.filter(|_| has_one_length);
        let is_by_tensor = is_several && self.op.pattern() == Pattern::AllReduce;
        let tensors = is_by_tensor
            .then(|| per_tensor(&signature.input_sizes))
            .flatten();
        MatchKey {
            class: OpClass::Known(class),
            dtype,
            size,
            tensors,
            root: self.root,
            reduce_op: self.reduce_op,
        }
    }
}

/// Appends the first few shapes; for more, their number and all elements together.
fn describe_shapes(sizes: &[Vec<u64>], text: &mut String) {
    const SHOWN: usize = 3;
    for shape in sizes.iter().take(SHOWN) {
        text.push_str(&format!(" {shape:?}"));
    }
    if sizes.len() > SHOWN {
        let elements = |shape: &Vec<u64>| {
            shape
                .iter()
                .fold(1, |product: u64, &n| product.saturating_mul(n))
        };
        let total = sizes.iter().map(elements).fold(0, u64::saturating_add);
        text.push_str(&format!(
            " and {} more ({total} elements)",
            sizes.len() - SHOWN
        ));
    }
}

/// A hash of element types: of their one name if all are equal, else of all names in order. `None` if none is recorded.
fn dtypes(names: &[String]) -> Option<u64> {
    let first = names.first()?;
    if names.iter().all(|name| name == first) {
        return Some(hash_of(first));
    }
    Some(hash_of(&names))
}

/// A hash of the number of elements of each tensor.
fn per_tensor(sizes: &[Vec<u64>]) -> Option<u64> {
    let elements: Vec<u64> = sizes
        .iter()
        .map(|shape| {
            shape
                .iter()
                .fold(1, |product: u64, &n| product.saturating_mul(n))
        })
        .collect();
    Some(hash_of(&elements))
}

/// A hash without a random seed: verdicts must be the same in every run.
fn hash_of<T: std::hash::Hash + ?Sized>(value: &T) -> u64 {
    use std::hash::Hasher;
    let mut hasher = std::hash::DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// The distinct calls of all ranks, numbered from 0.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    ids: HashTable<u32>,
    hasher: DefaultHashBuilder,
    calls: Vec<Call>,
    keys: Vec<MatchKey>,
}

impl Calls {
    /// The number of this call; a new call gets the next one. Allocates nothing for a known call.
    pub(crate) fn intern(&mut self, call: CallRef<'_>) -> u32 {
        let (calls, hasher) = (&self.calls, &self.hasher);
        let hash = hasher.hash_one(call);
        let same = |&id: &u32| calls[id as usize].as_ref() == call;
        if let Some(&id) = self.ids.find(hash, same) {
            return id;
        }
        let id =
            u32::try_from(self.calls.len()).expect("fewer than 2^32 distinct calls fit in memory");
        let hash_of = |&id: &u32| hasher.hash_one(calls[id as usize].as_ref());
        self.ids.insert_unique(hash, id, hash_of);
        let call = call.to_call();
        self.keys.push(call.match_key());
        self.calls.push(call);
        id
    }

    pub(crate) fn get(&self, id: u32) -> &Call {
        &self.calls[id as usize]
    }

    /// All calls, in order of their numbers.
    pub(crate) fn all(&self) -> &[Call] {
        &self.calls
    }

    /// The arguments by which the call with this number is compared.
    pub(crate) fn key(&self, id: u32) -> &MatchKey {
        &self.keys[id as usize]
    }

    /// The most severe difference between two calls; `None` if two members may issue them for one collective.
    pub(crate) fn difference(&self, a: u32, b: u32) -> Option<CallDifference> {
        if a == b {
            return None;
        }
        let mut difference = self.key(a).difference(self.key(b));
        if difference.is_none()
            && let (Some(one), Some(other)) = (self.get(a).block_name(), self.get(b).block_name())
            && !one.eq_ignore_ascii_case(other)
        {
            difference = Some(CallDifference::Op);
        }
        // A broadcast is compared by bytes: equal elements with other bytes differ in type.
        let elements = |id| self.get(id).signature.input_elements();
        if difference == Some(CallDifference::Size)
            && self.get(a).op == OpType::Broadcast
            && elements(a) == elements(b)
        {
            return Some(CallDifference::Dtype);
        }
        difference
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(op: OpType, input: &[u64], output: &[u64], dtype: &str) -> Call {
        let tensors = |shape: &[u64]| {
            if shape.is_empty() {
                vec![]
            } else {
                vec![shape.to_vec()]
            }
        };
        let types = |shape: &[u64]| {
            if shape.is_empty() {
                vec![]
            } else {
                vec![dtype.to_owned()]
            }
        };
        Call {
            op,
            signature: Signature {
                input_sizes: tensors(input),
                output_sizes: tensors(output),
                input_dtypes: types(input),
                output_dtypes: types(output),
                ..Signature::default()
            },
            root: None,
            reduce_op: None,
            timeout_ms: 0,
        }
    }

    fn difference(a: Call, b: Call) -> Option<CallDifference> {
        let mut calls = Calls::default();
        let (a, b) = (calls.intern(a.as_ref()), calls.intern(b.as_ref()));
        calls.difference(a, b)
    }

    #[test]
    fn shapes_of_equal_size_agree() {
        let a = call(OpType::AllReduce, &[8, 8], &[8, 8], "Float");
        let b = call(OpType::AllReduce, &[64], &[64], "Float");
        assert_eq!(difference(a, b), None);
    }

    #[test]
    fn markers_of_blocks_agree_unless_they_name_different_collectives() {
        let marker = |name: &str| {
            let mut marker = call(OpType::Coalesced, &[], &[], "");
            marker.signature.op_name = name.to_owned();
            marker
        };
        let gather = marker("ALLGATHER_coalesced");
        assert_eq!(difference(gather.clone(), marker("coalesced")), None);
        assert_eq!(
            difference(gather.clone(), marker("allgather_coalesced")),
            None
        );
        let scatter = marker("REDUCE_SCATTER_coalesced");
        let differ = difference(gather, scatter.clone());
        assert_eq!(differ, Some(CallDifference::Op));
        assert_eq!(scatter.describe(), "REDUCE_SCATTER_coalesced");
    }

    #[test]
    fn all_reduce_requires_one_size_and_one_type() {
        let a = call(OpType::AllReduce, &[64], &[64], "Float");
        assert_eq!(
            difference(a.clone(), call(OpType::AllReduce, &[96], &[96], "Float")),
            Some(CallDifference::Size)
        );
        assert_eq!(
            difference(a, call(OpType::AllReduce, &[64], &[64], "BFloat16")),
            Some(CallDifference::Dtype)
        );
    }

    #[test]
    fn gather_and_scatter_may_differ_on_the_side_that_only_the_root_has() {
        let root = call(OpType::Gather, &[4], &[4, 4], "Float");
        assert_eq!(
            difference(root, call(OpType::Gather, &[4], &[], "Float")),
            None
        );
        let root = call(OpType::Scatter, &[4, 4], &[4], "Float");
        assert_eq!(
            difference(root, call(OpType::Scatter, &[], &[4], "Float")),
            None
        );
    }

    #[test]
    fn uneven_parts_are_legal_where_the_operation_says_so() {
        let a = call(OpType::AllToAllSingle, &[10], &[20], "Float");
        assert_eq!(
            difference(a, call(OpType::AllToAllSingle, &[20], &[10], "Float")),
            None
        );
        let a = call(OpType::AllGather, &[3], &[8], "Float");
        assert_eq!(
            difference(a, call(OpType::AllGather, &[5], &[8], "Float")),
            None
        );
    }

    #[test]
    fn a_broadcast_compares_bytes() {
        let a = call(OpType::Broadcast, &[8], &[8], "Byte");
        assert_eq!(
            difference(a.clone(), call(OpType::Broadcast, &[8], &[8], "Char")),
            None
        );
        assert_eq!(
            difference(a.clone(), call(OpType::Broadcast, &[8], &[8], "Float")),
            Some(CallDifference::Dtype)
        );
        assert_eq!(
            difference(a, call(OpType::Broadcast, &[9], &[9], "Byte")),
            Some(CallDifference::Size)
        );
    }

    /// By what the calls of an operation are compared, as text: the class; whether by the element type of the input or
    /// of the output; the size, if the record holds inputs and outputs, and if it holds outputs only; and whether each
    /// tensor counts.
    fn compared(op: OpType) -> String {
        let named = |hash: Option<u64>| match hash {
            Some(hash) if hash == hash_of("Float") => "input",
            Some(hash) if hash == hash_of("Double") => "output",
            Some(_) => "?",
            None => "-",
        };
        let mut call = call(op, &[2], &[4, 5], "Float");
        call.signature.input_sizes.push(vec![3]);
        call.signature.output_dtypes = vec!["Double".to_owned()];
        let key = call.match_key();
        call.signature.input_sizes.clear();
        let outputs_only = call.match_key().size;
        let class = match key.class {
            OpClass::Known(class) => class.name(),
            OpClass::Named(_) => "by name",
        };
        let (dtype, size, tensors) = (named(key.dtype), key.size, key.tensors.is_some());
        format!("{op}: {class} {dtype} {size:?} {outputs_only:?} {tensors}")
    }

    #[test]
    fn every_operation_is_compared_by_what_its_kind_fixes() {
        let expectations = [
            "all_reduce: all_reduce input Some(5) Some(20) false",
            "all_reduce_coalesced: all_reduce_coalesced input Some(5) Some(20) true",
            "all_reduce_sparse: all_reduce_sparse input None None false",
            "reduce: reduce input Some(5) Some(20) false",
            "broadcast: broadcast - Some(11) Some(160) false",
            "barrier: barrier - None None false",
            "monitored_barrier: barrier - None None false",
            "all_gather: all_gather input Some(20) Some(20) false",
            "all_gather_single: all_gather input Some(20) Some(20) false",
            "all_gather_v: all_gather input Some(20) Some(20) false",
            "all_gather_coalesced: all_gather_coalesced input Some(20) Some(20) false",
            "reduce_scatter: reduce_scatter input Some(5) None false",
            "reduce_scatter_single: reduce_scatter input Some(5) None false",
            "reduce_scatter_v: reduce_scatter input Some(5) None false",
            "reduce_scatter_coalesced: reduce_scatter_coalesced input Some(5) None false",
            "all_to_all: all_to_all input None None false",
            "all_to_all_single: all_to_all input None None false",
            "all_to_all_v_single: all_to_all input None None false",
            "gather: gather input Some(5) None false",
            "gather_v: gather input None None false",
            "scatter: scatter output Some(20) Some(20) false",
            "scatter_v: scatter output None None false",
            "send: send input Some(5) Some(20) false",
            "recv: recv input Some(5) Some(20) false",
            "coalesced: coalesced - None None false",
            "split: split - None None false",
            "new_window: new_window - None None false",
            "put: put - None None false",
            "get: get - None None false",
            "signal: signal - None None false",
            "wait_signal: wait_signal - None None false",
            "other: by name - None None false",
        ];
        for expected in expectations {
            let name = expected.split(':').next().unwrap();
            assert_eq!(compared(OpType::from_name(name).unwrap()), expected);
        }
    }
}
