//! Cases of many asynchronous collectives that are in progress at once.

use crate::cases::Cases;
use crate::scalar::Scalar;
use rcomm::{Buffer, ReduceOp, Reduction};

impl Cases<'_> {
    /// Issues many collectives, then waits for them in another order. Also checks some blocking collectives. Checks
    /// nothing if the backend has no sums of this type.
    pub(crate) fn check_issued<T: Scalar>(&mut self) {
        let (group, this_rank, n, len) = (self.group, self.rank(), self.size(), self.len);
        let case = |name: &str| format!("{name} of {}", T::DTYPE);
        let op = ReduceOp::Sum;
        if self.limits.refuse(op, T::DTYPE) {
            return;
        }
        let root = n - 1;
        let root_rank = root as u32;
        let is_root = this_rank == root;
        let uneven: Vec<usize> = (0..n).map(|rank| len / (rank + 1)).collect();
        let even = vec![len; n];
        let lists = |lens: &[usize]| -> Vec<Vec<T>> {
            lens.iter().map(|&len| vec![T::default(); len]).collect()
        };
        let at_root = |lists: Vec<Vec<T>>| if is_root { lists } else { Vec::new() };
        let input = self.input::<T>(this_rank, 0, len);
        let wide = self.input::<T>(this_rank, 0, len * n);
        let part = self.input::<T>(this_rank, 0, uneven[this_rank]);
        let pair = self.inputs::<T>(this_rank, &[len, 1]);
        let both = self.inputs::<T>(this_rank, &[len * n, n]);
        let for_each = self.inputs::<T>(this_rank, &even);
        let for_each_v = self.inputs::<T>(this_rank, &uneven);
        let issued = "the operation is issued";

        let reduce = group
            .reduce_async(input.clone(), op, root_rank)
            .expect(issued);
        let all_reduce_coalesced = group
            .all_reduce_coalesced_async(pair.clone(), op)
            .expect(issued);
        let block = group.coalesce_async(|block| {
            block.all_reduce(input.clone(), op);
            block.broadcast(wide.clone(), root_rank);
        });
        let all_gather_v = group
            .all_gather_v_async(part.clone(), lists(&uneven))
            .expect(issued);
        let all_gather_coalesced = group
            .all_gather_coalesced_async(pair.clone(), lists(&[len * n, n]))
            .expect(issued);
        let reduce_scatter = group
            .reduce_scatter_async(for_each.clone(), vec![T::default(); len], op)
            .expect(issued);
        let reduce_scatter_v = group
            .reduce_scatter_v_async(
                for_each_v.clone(),
                vec![T::default(); uneven[this_rank]],
                op,
            )
            .expect(issued);
        let reduce_scatter_coalesced = group
            .reduce_scatter_coalesced_async(both.clone(), lists(&[len, 1]), op)
            .expect(issued);
        let all_to_all = group
            .all_to_all_async(for_each.clone(), lists(&even))
            .expect(issued);
        let all_to_all_single = group
            .all_to_all_single_async(wide.clone(), vec![T::default(); len * n])
            .expect(issued);
        let to_root = group
            .gather_async(input.clone(), at_root(lists(&even)), root_rank)
            .expect(issued);
        let to_root_v = group
            .gather_v_async(part.clone(), at_root(lists(&uneven)), root_rank)
            .expect(issued);
        let from_root = group
            .scatter_async(
                at_root(for_each.clone()),
                vec![T::default(); len],
                root_rank,
            )
            .expect(issued);
        let from_root_v = group
            .scatter_v_async(
                at_root(for_each_v),
                vec![T::default(); uneven[this_rank]],
                root_rank,
            )
            .expect(issued);

        // The input vectors are returned unchanged, with the results.
        let (_, got) = from_root_v.wait().unwrap();
        let expected = self.input(root, this_rank, uneven[this_rank]);
        self.assert_same(&case("scatter_v_async"), got, expected);
        let (_, got) = from_root.wait().unwrap();
        self.assert_same(
            &case("scatter_async"),
            got,
            self.input(root, this_rank, len),
        );
        let (kept, got) = to_root_v.wait().unwrap();
        self.assert_same(&case("gather_v_async, its input"), kept, part);
        let all: Vec<Vec<T>> = (0..n).map(|r| self.input(r, 0, uneven[r])).collect();
        self.assert_same(&case("gather_v_async"), got, at_root(all.clone()));
        let (_, got) = to_root.wait().unwrap();
        let each: Vec<Vec<T>> = (0..n).map(|r| self.input(r, 0, len)).collect();
        self.assert_same(&case("gather_async"), got, at_root(each.clone()));
        let (_, got) = all_to_all_single.wait().unwrap();
        let expected: Vec<T> = (0..n)
            .flat_map(|from| self.input::<T>(from, 0, len * n)[this_rank * len..][..len].to_vec())
            .collect();
        self.assert_same(&case("all_to_all_single_async"), got, expected);
        let (_, got) = all_to_all.wait().unwrap();
        let expected: Vec<Vec<T>> = (0..n)
            .map(|from| self.input(from, this_rank, len))
            .collect();
        self.assert_same(&case("all_to_all_async"), got, expected);
        let (_, got) = reduce_scatter_coalesced.wait().unwrap();
        let first = self.reduced::<T>(op, 0, len * n)[this_rank * len..][..len].to_vec();
        let second = self.reduced::<T>(op, 1, n)[this_rank..][..1].to_vec();
        self.assert_same(
            &case("reduce_scatter_coalesced_async"),
            got,
            vec![first, second],
        );
        let (_, got) = reduce_scatter_v.wait().unwrap();
        let expected = self.reduced(op, this_rank, uneven[this_rank]);
        self.assert_same(&case("reduce_scatter_v_async"), got, expected);
        let (kept, got) = reduce_scatter.wait().unwrap();
        self.assert_same(&case("reduce_scatter_async, its inputs"), kept, for_each);
        self.assert_same(
            &case("reduce_scatter_async"),
            got,
            self.reduced(op, this_rank, len),
        );
        let (_, got) = all_gather_coalesced.wait().unwrap();
        let ones: Vec<T> = (0..n).flat_map(|r| self.input(r, 1, 1)).collect();
        let expected = vec![each.concat(), ones];
        self.assert_same(&case("all_gather_coalesced_async"), got, expected);
        let (_, got) = all_gather_v.wait().unwrap();
        self.assert_same(&case("all_gather_v_async"), got, all);
        let ops = block.expect(issued).wait().unwrap();
        let sum = ops[0].outputs()[0].as_slice::<T>().unwrap().to_vec();
        self.assert_same(&case("coalesce_async"), sum, self.reduced(op, 0, len));
        let broadcast = ops[1].outputs()[0].as_slice::<T>().unwrap().to_vec();
        self.assert_same(
            &case("coalesce_async"),
            broadcast,
            self.input(root, 0, len * n),
        );
        let got = all_reduce_coalesced.wait().unwrap();
        let expected = vec![self.reduced(op, 0, len), self.reduced(op, 1, 1)];
        self.assert_same(&case("all_reduce_coalesced_async"), got, expected);
        let got = reduce.wait().unwrap();
        let sum = self.reduced(op, 0, len);
        self.assert_same(
            &case("reduce_async"),
            got,
            if is_root { sum } else { input },
        );

        let inputs = both;
        let mut outputs = lists(&[len, 1]);
        let views: Vec<&[T]> = inputs.iter().map(Vec::as_slice).collect();
        let mut output_slices: Vec<&mut [T]> = outputs.iter_mut().map(Vec::as_mut_slice).collect();
        group
            .reduce_scatter_coalesced(&views, &mut output_slices, op)
            .unwrap();
        let first = self.reduced::<T>(op, 0, len * n)[this_rank * len..][..len].to_vec();
        let second = self.reduced::<T>(op, 1, n)[this_rank..][..1].to_vec();
        self.assert_same(
            &case("reduce_scatter_coalesced"),
            outputs,
            vec![first, second],
        );
        if Reduction::allows(ReduceOp::PremulSum, T::DTYPE) {
            let twice = Reduction::premul_sum_by(Buffer::from_vec(vec![T::of(2)]));
            // Doubling every rank's input gives the sum over twice as many inputs.
            let doubled = |which: usize, len: usize| -> Vec<T> {
                let all: Vec<Vec<T>> = (0..n).map(|r| self.input(r, which, len)).collect();
                let at = |i: usize| all.iter().flat_map(|v| [v[i]; 2]).collect::<Vec<T>>();
                (0..len).map(|i| T::reduce(op, &at(i))).collect()
            };
            let (one, whole) = (doubled(0, len), doubled(0, len * n));
            let mut buffer = self.input::<T>(this_rank, 0, len);
            group.reduce(&mut buffer, twice.clone(), root_rank).unwrap();
            let left = if is_root {
                one
            } else {
                self.input(this_rank, 0, len)
            };
            self.assert_same(&case("reduce premul_sum"), buffer, left);
            let mut output = vec![T::default(); len];
            group
                .reduce_scatter_single(&wide, &mut output, twice)
                .unwrap();
            let expected = whole[this_rank * len..][..len].to_vec();
            self.assert_same(&case("reduce_scatter_single premul_sum"), output, expected);
        }
    }
}
