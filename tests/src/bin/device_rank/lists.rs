//! Gathers and scatters lists whose parts are adjacent or in separate allocations.

use super::Gpu;
use rcomm::backend::nccl::DeviceBuffer;
use rcomm::{Buffer, Op, ProcessGroup, Result, World};

/// A list of one part for each rank, in one allocation or in several.
struct List {
    parts: Vec<DeviceBuffer>,
    buffers: Vec<Buffer<'static>>,
}

impl List {
    /// A list whose part for a rank consists of `value(rank)`.
    fn new(
        gpu: &Gpu,
        group: &ProcessGroup,
        is_contiguous: bool,
        value: impl Fn(u32) -> i32,
    ) -> Result<Self> {
        const LEN: usize = 100;
        let values = |rank: u32| vec![value(rank); LEN];
        let parts: Vec<DeviceBuffer> = if is_contiguous {
            let all: Vec<i32> = (0..group.size()).flat_map(values).collect();
            let whole = gpu.buffer(&all)?;
            let bytes = LEN * size_of::<i32>();
            let part = |rank: u32| {
                let at = whole.address() + u64::from(rank) * bytes as u64;
                let owner = std::sync::Arc::new(whole.clone());
                // SAFETY: `LEN` elements at `at` are part `rank` of the `size` parts of `whole`, of which
                // the owner is a clone.
                unsafe { DeviceBuffer::foreign(whole.stream(), at, whole.dtype(), LEN, owner) }
            };
            (0..group.size()).map(part).collect::<Result<_>>()?
        } else {
            // The parts are allocated in reverse order, so that consecutive ones are not adjacent.
            let apart = |rank: u32| gpu.buffer(&values(rank));
            (0..group.size())
                .rev()
                .map(apart)
                .collect::<Result<Vec<_>>>()?
                .into_iter()
                .rev()
                .collect()
        };
        let buffers = parts
            .iter()
            .map(DeviceBuffer::buffer)
            .collect::<Result<_>>()?;
        Ok(Self { parts, buffers })
    }
}

/// Gathers to each rank and scatters from each, with lists in one allocation and in several.
pub(super) fn gather_and_scatter(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let this_rank = i32::try_from(group.rank()).expect("a small number");
    for (round, is_contiguous) in [(1, true), (2, false), (3, false), (4, true)] {
        for root in 0..group.size() {
            let is_root = group.rank() == root;
            let number = |rank: u32| round * 100 + i32::try_from(rank).expect("a small number");
            let mine = gpu.buffer(&[number(group.rank()); 100])?;
            let list = List::new(gpu, group, is_contiguous, |_| -1)?;
            let outputs = if is_root { list.buffers } else { Vec::new() };
            let gather = Op::Gather {
                input: mine.buffer()?,
                outputs,
                root,
            };
            group.execute_async(gather)?.wait()?;
            if is_root {
                for (part, rank) in list.parts.iter().zip(0..) {
                    assert_eq!(
                        part.to_vec::<i32>()?,
                        vec![number(rank); 100],
                        "gather to {root}"
                    );
                }
            }
            let list = List::new(gpu, group, is_contiguous, |rank| 7 * number(rank))?;
            let inputs = if is_root { list.buffers } else { Vec::new() };
            let scatter = Op::Scatter {
                inputs,
                output: mine.buffer()?,
                root,
            };
            group.execute_async(scatter)?.wait()?;
            let expected = 7 * (round * 100 + this_rank);
            assert_eq!(
                mine.to_vec::<i32>()?,
                vec![expected; 100],
                "scatter from {root}"
            );
        }
    }
    eprintln!("gathered and scattered");
    Ok(())
}
