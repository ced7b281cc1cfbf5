//! The cases that are checked in one group: most operations in their blocking form, some in their asynchronous one.
//!
//! The inputs of all ranks are a function of rank, vector, position and seed, so that each rank can check its own
//! result.

use crate::limits::Limits;
use crate::scalar::{Scalar, reductions};
use rcomm::{Buffer, DType, ErrorKind, Op, ProcessGroup, ReduceOp, Reduction};

/// Runs cases on one group and counts them.
pub(crate) struct Cases<'a> {
    pub(crate) group: &'a ProcessGroup,
    /// The number of elements of most vectors; other lengths follow from it.
    pub(crate) len: usize,
    seed: u64,
    pub(crate) limits: Limits,
    /// The number of cases so far.
    checked: u64,
}

/// The finalizer of SplitMix64.
fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

/// Several vectors, such as one for each rank.
type Lists<T> = Vec<Vec<T>>;

fn slices<T>(lists: &Lists<T>) -> Vec<&[T]> {
    lists.iter().map(Vec::as_slice).collect()
}

fn slices_mut<T>(lists: &mut Lists<T>) -> Vec<&mut [T]> {
    lists.iter_mut().map(Vec::as_mut_slice).collect()
}

impl<'a> Cases<'a> {
    pub(crate) fn new(group: &'a ProcessGroup, len: usize, seed: u64) -> Self {
        Self {
            group,
            len,
            seed,
            limits: Limits::of(group),
            checked: 0,
        }
    }

    /// The number of cases so far.
    pub(crate) fn checked(&self) -> u64 {
        self.checked
    }

    /// This rank's number in the group.
    pub(crate) fn rank(&self) -> usize {
        self.group.rank() as usize
    }

    pub(crate) fn size(&self) -> usize {
        self.group.size() as usize
    }

    /// Input vector number `which` of a rank.
    pub(crate) fn input<T: Scalar>(&self, rank: usize, which: usize, len: usize) -> Vec<T> {
        let start = mix(self.seed ^ mix(rank as u64) ^ mix(which as u64).rotate_left(7));
        // NCCL rounds after each step of a sum. Of zeros and ones, sums over eight ranks are exact also in the 8-bit
        // float with the shortest mantissa, in whatever order they are added.
        let (first, kinds) = match T::DTYPE {
            DType::F8E4M3 | DType::F8E5M2 => (0, 2),
            _ => (1, 3),
        };
        let value = |index: usize| T::of((mix(start ^ index as u64) % kinds) as u8 + first);
        (0..len).map(value).collect()
    }

    /// The input vectors of a rank, with these lengths.
    pub(crate) fn inputs<T: Scalar>(&self, rank: usize, lens: &[usize]) -> Lists<T> {
        let lens = lens.iter().enumerate();
        lens.map(|(which, &len)| self.input(rank, which, len))
            .collect()
    }

    /// The reduction of vector `which` over all ranks.
    pub(crate) fn reduced<T: Scalar>(&self, op: ReduceOp, which: usize, len: usize) -> Vec<T> {
        let all: Lists<T> = (0..self.size())
            .map(|rank| self.input(rank, which, len))
            .collect();
        let at = |index: usize| -> Vec<T> { all.iter().map(|values| values[index]).collect() };
        (0..len).map(|index| T::reduce(op, &at(index))).collect()
    }

    /// Counts a case, and panics if the values differ. The message begins with `case`.
    pub(crate) fn assert_same<T: PartialEq + std::fmt::Debug>(
        &mut self,
        case: &str,
        got: T,
        expected: T,
    ) {
        self.checked += 1;
        if got == expected {
            return;
        }
        let (got, expected) = (format!("{got:?}"), format!("{expected:?}"));
        let cut = |text: &str| text.chars().take(400).collect::<String>();
        panic!(
            "{case}, {} elements, rank {} of {}: got {}, expected {}",
            self.len,
            self.rank(),
            self.size(),
            cut(&got),
            cut(&expected)
        );
    }

    /// Checks the collectives on elements of this type, most in their blocking form and some in their asynchronous
    /// form. A scatter is checked in the asynchronous form only, and a coalesced reduce-scatter by `check_issued`.
    pub(crate) fn check<T: Scalar>(&mut self) {
        self.check_reductions::<T>();
        self.check_rooted::<T>();
        self.check_gathers::<T>();
        self.check_exchanges::<T>();
    }

    fn check_reductions<T: Scalar>(&mut self) {
        let (group, this_rank, n, len) = (self.group, self.rank(), self.size(), self.len);
        let root = n - 1;
        for op in reductions::<T>() {
            let case = |name: &str| format!("{name} {op} of {}", T::DTYPE);
            let input = self.input::<T>(this_rank, 0, len);
            if self.limits.refuse(op, T::DTYPE) {
                let mut buffer = input.clone();
                let refusal = group.all_reduce(&mut buffer, op).unwrap_err();
                self.assert_same(&case("refused"), refusal.kind(), ErrorKind::Unsupported);
                self.assert_same(&case("untouched"), buffer, input);
                continue;
            }
            let expected = self.reduced::<T>(op, 0, len);
            let mut buffer = input.clone();
            group.all_reduce(&mut buffer, op).unwrap();
            self.assert_same(&case("all_reduce"), buffer, expected.clone());
            let got = group.all_reduce_async(input.clone(), op).unwrap().wait();
            self.assert_same(&case("all_reduce_async"), got.unwrap(), expected.clone());

            let mut buffer = input.clone();
            group.reduce(&mut buffer, op, root as u32).unwrap();
            let left = if this_rank == root { &expected } else { &input };
            self.assert_same(&case("reduce"), buffer, left.clone());

            let lens = [len, len / 2];
            let expected: Lists<T> = (0..2).map(|i| self.reduced(op, i, lens[i])).collect();
            let mut buffers = self.inputs::<T>(this_rank, &lens);
            group
                .all_reduce_coalesced(&mut slices_mut(&mut buffers), op)
                .unwrap();
            self.assert_same(&case("all_reduce_coalesced"), buffers, expected.clone());
            let mut buffers = self.inputs::<T>(this_rank, &lens);
            let [first, second] = &mut buffers[..] else {
                unreachable!()
            };
            group
                .coalesce(|block| {
                    block.all_reduce(first.as_mut_slice(), op);
                    block.all_reduce(second.as_mut_slice(), op);
                })
                .unwrap();
            self.assert_same(&case("coalesce"), buffers, expected);

            let whole = self.reduced::<T>(op, 0, len * n);
            let mut output = vec![T::default(); len];
            let input = self.input::<T>(this_rank, 0, len * n);
            group
                .reduce_scatter_single(&input, &mut output, op)
                .unwrap();
            let part = whole[this_rank * len..][..len].to_vec();
            self.assert_same(&case("reduce_scatter_single"), output.clone(), part.clone());
            let work = group
                .reduce_scatter_single_async(input, output, op)
                .unwrap();
            let (_, got) = work.wait().unwrap();
            self.assert_same(&case("reduce_scatter_single_async"), got, part);

            let lens: Vec<usize> = (0..n).map(|rank| len / (rank + 1)).collect();
            let inputs = self.inputs::<T>(this_rank, &lens);
            let mut output = vec![T::default(); lens[this_rank]];
            group
                .reduce_scatter_v(&slices(&inputs), &mut output, op)
                .unwrap();
            let expected = self.reduced::<T>(op, this_rank, lens[this_rank]);
            self.assert_same(&case("reduce_scatter_v"), output, expected);

            let inputs = self.inputs::<T>(this_rank, &vec![len; n]);
            let mut output = vec![T::default(); len];
            group
                .reduce_scatter(&slices(&inputs), &mut output, op)
                .unwrap();
            let expected = self.reduced::<T>(op, this_rank, len);
            self.assert_same(&case("reduce_scatter"), output, expected);
        }
        if Reduction::allows(ReduceOp::PremulSum, T::DTYPE) {
            // Doubling every rank's input gives the sum over twice as many inputs.
            let all: Lists<T> = (0..n).map(|r| self.input(r, 0, len)).collect();
            let twice = |at: usize| -> Vec<T> { all.iter().flat_map(|v| [v[at]; 2]).collect() };
            let expected: Vec<T> = (0..len)
                .map(|i| T::reduce(ReduceOp::Sum, &twice(i)))
                .collect();
            let mut buffer = self.input::<T>(this_rank, 0, len);
            group
                .all_reduce(&mut buffer, Reduction::premul_sum(2.0))
                .unwrap();
            self.assert_same("all_reduce premul_sum", buffer, expected.clone());
            let mut buffer = self.input::<T>(this_rank, 0, len);
            let two = Buffer::from_vec(vec![T::of(2)]);
            group
                .all_reduce(&mut buffer, Reduction::premul_sum_by(two))
                .unwrap();
            self.assert_same("all_reduce premul_sum_by", buffer, expected);
        }
    }

    fn check_rooted<T: Scalar>(&mut self) {
        let (group, this_rank, n, len) = (self.group, self.rank(), self.size(), self.len);
        for root in [0, n - 1] {
            let case = |name: &str| format!("{name} of {} from {root}", T::DTYPE);
            let is_root = this_rank == root;
            let root_rank = root as u32;
            let expected = self.input::<T>(root, 0, len);
            let mut buffer = self.input::<T>(this_rank, 0, len);
            group.broadcast(&mut buffer, root_rank).unwrap();
            self.assert_same(&case("broadcast"), buffer, expected.clone());
            let buffer = self.input::<T>(this_rank, 0, len);
            let work = group.broadcast_async(buffer, root_rank).unwrap();
            let got = work.wait().unwrap();
            self.assert_same(&case("broadcast_async"), got, expected);

            for (name, lens) in [
                ("even", vec![len; n]),
                ("uneven", (0..n).map(|rank| len / (rank + 1)).collect()),
            ] {
                let all: Lists<T> = (0..n).map(|r| self.input(r, 0, lens[r])).collect();
                let expected = if is_root { all } else { Vec::new() };
                let blank = |len: &usize| vec![T::default(); *len];
                let mut outputs: Lists<T> = if is_root {
                    lens.iter().map(blank).collect()
                } else {
                    Vec::new()
                };
                let input = self.input::<T>(this_rank, 0, lens[this_rank]);
                if name == "even" {
                    group
                        .gather(&input, &mut slices_mut(&mut outputs), root_rank)
                        .unwrap();
                } else {
                    group
                        .gather_v(&input, &mut slices_mut(&mut outputs), root_rank)
                        .unwrap();
                }
                self.assert_same(&case(&format!("gather {name}")), outputs, expected);

                let inputs: Lists<T> = if is_root {
                    self.inputs(this_rank, &lens)
                } else {
                    Vec::new()
                };
                let expected = self.inputs::<T>(root, &lens).swap_remove(this_rank);
                let output = vec![T::default(); lens[this_rank]];
                let (_, got) = if name == "even" {
                    group
                        .scatter_async(inputs, output, root_rank)
                        .unwrap()
                        .wait()
                        .unwrap()
                } else {
                    group
                        .scatter_v_async(inputs, output, root_rank)
                        .unwrap()
                        .wait()
                        .unwrap()
                };
                self.assert_same(&case(&format!("scatter {name}")), got, expected);
            }
        }
    }

    fn check_gathers<T: Scalar>(&mut self) {
        let (group, this_rank, n, len) = (self.group, self.rank(), self.size(), self.len);
        let case = |name: &str| format!("{name} of {}", T::DTYPE);
        let input = self.input::<T>(this_rank, 0, len);
        let all: Lists<T> = (0..n).map(|r| self.input(r, 0, len)).collect();
        let mut outputs = vec![vec![T::default(); len]; n];
        group
            .all_gather(&input, &mut slices_mut(&mut outputs))
            .unwrap();
        self.assert_same(&case("all_gather"), outputs, all.clone());
        let outputs = vec![vec![T::default(); len]; n];
        let work = group.all_gather_async(input.clone(), outputs).unwrap();
        let (_, got) = work.wait().unwrap();
        self.assert_same(&case("all_gather_async"), got, all.clone());

        let mut output = vec![T::default(); len * n];
        group.all_gather_single(&input, &mut output).unwrap();
        self.assert_same(&case("all_gather_single"), output.clone(), all.concat());
        let work = group
            .all_gather_single_async(input.clone(), output)
            .unwrap();
        let (_, got) = work.wait().unwrap();
        self.assert_same(&case("all_gather_single_async"), got, all.concat());

        let inputs = self.inputs::<T>(this_rank, &[len, 1]);
        let mut outputs = vec![vec![T::default(); len * n], vec![T::default(); n]];
        group
            .all_gather_coalesced(&slices(&inputs), &mut slices_mut(&mut outputs))
            .unwrap();
        let ones: Vec<T> = (0..n).flat_map(|r| self.input(r, 1, 1)).collect();
        self.assert_same(
            &case("all_gather_coalesced"),
            outputs,
            vec![all.concat(), ones],
        );

        let lens: Vec<usize> = (0..n).map(|rank| len / (rank + 1)).collect();
        let input = self.input::<T>(this_rank, 0, lens[this_rank]);
        let all: Lists<T> = (0..n).map(|r| self.input(r, 0, lens[r])).collect();
        let mut outputs: Lists<T> = lens.iter().map(|&len| vec![T::default(); len]).collect();
        group
            .all_gather_v(&input, &mut slices_mut(&mut outputs))
            .unwrap();
        self.assert_same(&case("all_gather_v"), outputs, all);
    }

    fn check_exchanges<T: Scalar>(&mut self) {
        let (group, this_rank, n, len) = (self.group, self.rank(), self.size(), self.len);
        let case = |name: &str| format!("{name} of {}", T::DTYPE);
        // Rank a sends len / (a + b + 1) elements to rank b.
        let amount = |from: usize, to: usize| len / (from + to + 1);
        let out: Vec<usize> = (0..n).map(|to| amount(this_rank, to)).collect();
        let back: Vec<usize> = (0..n).map(|from| amount(from, this_rank)).collect();
        let expected: Lists<T> = (0..n)
            .map(|from| self.input(from, this_rank, back[from]))
            .collect();
        let inputs = self.inputs::<T>(this_rank, &out);
        let mut outputs: Lists<T> = back.iter().map(|&len| vec![T::default(); len]).collect();
        group
            .all_to_all(&slices(&inputs), &mut slices_mut(&mut outputs))
            .unwrap();
        self.assert_same(&case("all_to_all"), outputs, expected.clone());

        let input = inputs.concat();
        let mut output = vec![T::default(); back.iter().sum()];
        group
            .all_to_all_v_single(&input, &mut output, &out, &back)
            .unwrap();
        self.assert_same(
            &case("all_to_all_v_single"),
            output.clone(),
            expected.concat(),
        );
        let work = group
            .all_to_all_v_single_async(input, output, &out, &back)
            .unwrap();
        let (_, got) = work.wait().unwrap();
        self.assert_same(&case("all_to_all_v_single_async"), got, expected.concat());

        let input: Vec<T> = (0..n)
            .flat_map(|to| self.input(this_rank, to, len))
            .collect();
        let expected: Vec<T> = (0..n)
            .flat_map(|from| self.input(from, this_rank, len))
            .collect();
        let mut output = vec![T::default(); len * n];
        group.all_to_all_single(&input, &mut output).unwrap();
        self.assert_same(&case("all_to_all_single"), output, expected);
    }

    /// Checks barriers and objects, and, if the group has several ranks, messages.
    pub(crate) fn check_messages(&mut self) {
        let (group, this_rank, n, len) = (self.group, self.rank(), self.size(), self.len);
        group.barrier().unwrap();
        group.barrier_async().unwrap().wait().unwrap();
        let names = group
            .all_gather_object(&format!("rank {this_rank}"))
            .unwrap();
        let expected: Vec<String> = (0..n).map(|rank| format!("rank {rank}")).collect();
        self.assert_same("all_gather_object", names, expected.clone());
        let mut object = (this_rank, vec![this_rank; 3]);
        group.broadcast_object(&mut object, 0).unwrap();
        self.assert_same("broadcast_object", object, (0, vec![0; 3]));
        let gathered = group.gather_object(&this_rank, 0).unwrap();
        let all = (this_rank == 0).then(|| (0..n).collect::<Vec<_>>());
        self.assert_same("gather_object", gathered, all);
        let mine: String = group.scatter_object(&expected, 0).unwrap();
        self.assert_same("scatter_object", mine, expected[this_rank].clone());
        self.check_issued_objects(&expected);
        if n == 1 {
            return;
        }
        let (next, before) = ((this_rank + 1) % n, (this_rank + n - 1) % n);
        let message = self.input::<u32>(this_rank, 0, len);
        let expected = self.input::<u32>(before, 0, len);
        let sent = group.send_async(message.clone(), next as u32, 0).unwrap();
        let mut got = vec![0u32; len];
        group.recv(&mut got, before as u32, 0).unwrap();
        assert_eq!(sent.wait().unwrap(), message);
        self.assert_same("send and recv", got, expected.clone());

        let ops = vec![
            Op::Recv {
                buffer: Buffer::from_vec(vec![0u32; len]),
                peer: Some(before as u32),
                tag: 0,
            },
            Op::Send {
                buffer: Buffer::from_vec(message.clone()),
                peer: next as u32,
                tag: 0,
            },
        ];
        let mut ops = group.batch_isend_irecv(ops).unwrap().wait().unwrap();
        let Op::Recv { buffer, .. } = ops.swap_remove(0) else {
            panic!("the operations do not come back in their order");
        };
        self.assert_same("batch_isend_irecv", buffer.into_vec().unwrap(), expected);

        match self.limits {
            Limits::None => self.check_tags(next, before),
            Limits::Nccl => {
                let tagged = group.send(&[1u8], next as u32, 1).unwrap_err();
                self.assert_same("a tag", tagged.kind(), ErrorKind::Unsupported);
                let any = group.recv_any(&mut [0u8], 0).unwrap_err();
                self.assert_same("recv_any", any.kind(), ErrorKind::Unsupported);
            }
        }
        group.barrier().unwrap();
    }

    /// Passes several objects at once while other operations run. In one of these operations, rank 0 calls the blocking
    /// form, and the others the asynchronous one.
    fn check_issued_objects(&mut self, names: &[String]) {
        let (group, this_rank, n) = (self.group, self.rank(), self.size());
        let root = n as u32 - 1;
        let gathered = group.all_gather_object_async(&names[this_rank]).unwrap();
        let from_root = group.broadcast_object_async((this_rank, "from_root".to_owned()), root);
        let sum = group.all_reduce_async(vec![1u32], ReduceOp::Sum).unwrap();
        let mut mixed = None;
        if this_rank == 0 {
            mixed = Some(group.all_gather_object(&this_rank).unwrap());
        }
        let mixed = match mixed {
            Some(all) => all,
            None => group
                .all_gather_object_async(&this_rank)
                .unwrap()
                .wait()
                .unwrap(),
        };
        self.assert_same("all_gather_object both ways", mixed, (0..n).collect());
        let to_root = group.gather_object_async(&this_rank, root).unwrap();
        let mine = group.scatter_object_async(names, root).unwrap();
        self.assert_same(
            "scatter_object_async",
            mine.wait().unwrap(),
            names[this_rank].clone(),
        );
        let all = (this_rank as u32 == root).then(|| (0..n).collect::<Vec<_>>());
        self.assert_same("gather_object_async", to_root.wait().unwrap(), all);
        self.assert_same(
            "with objects in flight",
            sum.wait().unwrap(),
            vec![n as u32],
        );
        let from_root = from_root.unwrap().wait().unwrap();
        let expected = (root as usize, "from_root".to_owned());
        self.assert_same("broadcast_object_async", from_root, expected);
        let gathered = gathered.wait().unwrap();
        self.assert_same("all_gather_object_async", gathered, names.to_vec());
        let refused = group.broadcast_object_async(0u8, root + 1).unwrap_err();
        self.assert_same("no such root", refused.kind(), ErrorKind::InvalidArgument);
    }

    /// Checks messages with tags, as objects and as vectors, and receives from any rank.
    fn check_tags(&mut self, next: usize, before: usize) {
        let (group, this_rank, n) = (self.group, self.rank(), self.size());
        // A send may wait for its receive, so one rank begins with the receive.
        let send = || {
            group
                .send_object(&vec![this_rank; 2], next as u32, 9)
                .unwrap();
        };
        if this_rank != 0 {
            send();
        }
        let object: Vec<usize> = group.recv_object(before as u32, 9).unwrap();
        if this_rank == 0 {
            send();
        }
        self.assert_same("send_object and recv_object", object, vec![before; 2]);
        let sent = group.send_object_async(&this_rank, next as u32, 9).unwrap();
        let object: usize = group.recv_object(before as u32, 9).unwrap();
        self.assert_same("send_object_async", object, before);
        sent.wait().unwrap();

        // Several receives with two tags are pending, and each gets its own message.
        let receive = |tag| group.recv_object_async::<String>(before as u32, tag);
        let works = [
            receive(9).unwrap(),
            receive(9).unwrap(),
            receive(10).unwrap(),
        ];
        let long = "x".repeat(70_000);
        for (tag, text) in [(10, "c"), (9, "a"), (9, long.as_str())] {
            let text = format!("{this_rank} {text}");
            group
                .send_object_async(&text, next as u32, tag)
                .unwrap()
                .wait()
                .unwrap();
        }
        let expected = ["a", &long, "c"].map(|text| format!("{before} {text}"));
        for (work, expected) in works.into_iter().zip(expected) {
            self.assert_same("recv_object_async", work.wait().unwrap(), expected);
        }

        // Messages are matched by tag, not by the order of issue.
        let first = group.send_async(vec![1u8], next as u32, 11).unwrap();
        let second = group.send_async(vec![2u8], next as u32, 12).unwrap();
        let later = group.recv_async(vec![0u8], before as u32, 12).unwrap();
        let earlier = group.recv_async(vec![0u8], before as u32, 11).unwrap();
        self.assert_same("recv by tag", later.wait().unwrap(), vec![2]);
        self.assert_same("recv by tag", earlier.wait().unwrap(), vec![1]);
        first.wait().unwrap();
        second.wait().unwrap();

        if this_rank == 0 {
            let mut seen: Vec<(u32, u8)> = Vec::new();
            for _ in 1..n {
                let mut byte = [0u8];
                seen.push((group.recv_any(&mut byte, 3).unwrap(), byte[0]));
            }
            seen.sort_unstable();
            let all: Vec<(u32, u8)> = (1..n).map(|rank| (rank as u32, rank as u8)).collect();
            self.assert_same("recv_any", seen, all);
        } else {
            group.send(&[this_rank as u8], 0, 3).unwrap();
        }
    }
}
