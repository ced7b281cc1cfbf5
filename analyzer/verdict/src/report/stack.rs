//! The merged call stacks of a report.

use rcomm_recorder::model::{Frame, Rank};
use serde::{Deserialize, Serialize};

/// At most this many frames of a stack are merged. A dump may hold stacks of any length, and a tree of frames is
/// sorted, copied, written and dropped by recursion.
const MAX_DEPTH: usize = 512;

/// One frame of the merged stacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StackNode {
    /// Name of the function.
    pub name: String,
    /// Path of the source file.
    pub filename: String,
    /// Line number; 0 if unknown.
    pub line: u32,
    /// Ranks whose newest call passes through this frame, ascending.
    pub ranks: Vec<Rank>,
    /// Frames called from here.
    pub children: Vec<StackNode>,
}

impl StackNode {
    /// Merges call stacks. Each consists of its frames, from the outermost inward, and the ranks that have it. Of a
    /// stack only the outermost 512 frames are kept.
    pub fn merge<'a, F>(stacks: impl Iterator<Item = (F, Vec<Rank>)>) -> Vec<Self>
    where
        F: Iterator<Item = &'a Frame>,
    {
        let mut roots: Vec<Self> = Vec::new();
        for (frames, ranks) in stacks {
            let mut level = &mut roots;
            for frame in frames.take(MAX_DEPTH) {
                let known = level.iter().position(|node| {
                    node.name == frame.name
                        && node.filename == frame.filename
                        && node.line == frame.line
                });
                let index = known.unwrap_or_else(|| {
                    level.push(Self {
                        name: frame.name.clone(),
                        filename: frame.filename.clone(),
                        line: frame.line,
                        ranks: Vec::new(),
                        children: Vec::new(),
                    });
                    level.len() - 1
                });
                level[index].ranks.extend(&ranks);
                level = &mut level[index].children;
            }
        }
        sort_stacks(&mut roots);
        roots
    }

    /// The ranks in the calling frame, `caller`, that are not in this one, ascending: they called something else or
    /// stopped in the calling frame.
    pub fn not_here(&self, caller: &[Rank]) -> Vec<Rank> {
        let elsewhere = caller.iter().copied();
        elsewhere
            .filter(|rank| self.ranks.binary_search(rank).is_err())
            .collect()
    }
}

/// Sorts the frames of each level by file, line and name, and the ranks of each frame.
fn sort_stacks(nodes: &mut [StackNode]) {
    for node in nodes.iter_mut() {
        node.ranks.sort_unstable();
        node.ranks.dedup();
        // `MAX_DEPTH` bounds this recursion.
        sort_stacks(&mut node.children);
    }
    nodes.sort_by(|a, b| {
        (&a.filename, a.line, &a.name, &a.ranks).cmp(&(&b.filename, b.line, &b.name, &b.ranks))
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_of_a_million_frames_is_cut() {
        let frame = Frame {
            name: "recurse".to_owned(),
            filename: "train.py".to_owned(),
            line: 7,
        };
        let frames = std::iter::repeat_n(&frame, 1_000_000);
        let merged = StackNode::merge(std::iter::once((frames, vec![3])));
        let mut level = &merged[..];
        let mut depth = 0;
        while let [node] = level {
            assert_eq!((node.name.as_str(), &node.ranks[..]), ("recurse", &[3][..]));
            level = &node.children;
            depth += 1;
        }
        assert_eq!(depth, MAX_DEPTH);
    }
}
