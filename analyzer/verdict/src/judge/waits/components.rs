//! Finds the strongly connected components of a graph.

/// The strongly connected components by Tarjan's algorithm (R. Tarjan, "Depth-first search and linear graph
/// algorithms", SIAM J. Comput. 1972), without recursion. Each component is an ascending list of nodes and comes before
/// those that point to it.
pub(crate) fn components(
    nodes: usize,
    successors: impl Fn(usize) -> Vec<usize>,
) -> Vec<Vec<usize>> {
    const UNSEEN: usize = usize::MAX;
    let mut index = vec![UNSEEN; nodes];
    let mut low = vec![0; nodes];
    let mut on_stack = vec![false; nodes];
    let mut stack = Vec::new();
    let mut found = Vec::new();
    let mut next = 0;
    for root in 0..nodes {
        if index[root] != UNSEEN {
            continue;
        }
        let mut calls: Vec<(usize, Vec<usize>, usize)> = vec![(root, successors(root), 0)];
        index[root] = next;
        low[root] = next;
        next += 1;
        stack.push(root);
        on_stack[root] = true;
        while let Some((node, targets, position)) = calls.last_mut() {
            if let Some(&child) = targets.get(*position) {
                *position += 1;
                let node = *node;
                if index[child] == UNSEEN {
                    index[child] = next;
                    low[child] = next;
                    next += 1;
                    stack.push(child);
                    on_stack[child] = true;
                    calls.push((child, successors(child), 0));
                } else if on_stack[child] {
                    low[node] = low[node].min(index[child]);
                }
                continue;
            }
            let node = *node;
            calls.pop();
            if let Some((parent, ..)) = calls.last() {
                low[*parent] = low[*parent].min(low[node]);
            }
            if low[node] == index[node] {
                let mut component = Vec::new();
                while let Some(member) = stack.pop() {
                    on_stack[member] = false;
                    component.push(member);
                    if member == node {
                        break;
                    }
                }
                component.sort_unstable();
                found.push(component);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_come_before_those_that_point_to_them() {
        // 0 -> 1 -> 2 -> 1, 3 alone
        let edges = [vec![1], vec![2], vec![1], vec![]];
        let found = components(4, |node| edges[node].clone());
        assert_eq!(found, vec![vec![1, 2], vec![0], vec![3]]);
    }

    #[test]
    fn a_long_chain_does_not_recurse() {
        let found = components(200_000, |node| {
            if node + 1 < 200_000 {
                vec![node + 1]
            } else {
                vec![]
            }
        });
        assert_eq!(found.len(), 200_000);
        assert_eq!(found[0], vec![199_999]);
    }
}
