//! The values of a pickle: a stack, a memo, and containers in flat tables.

use super::cell::{Cell, Fault};

/// A run of items in one container.
#[derive(Clone, Copy)]
struct Chunk {
    start: u32,
    len: u32,
    /// Index into `chunks`, or [`END`].
    next: u32,
}

/// A list, tuple or dict. Most are filled in one step, so their first run is stored here.
#[derive(Clone, Copy)]
pub(super) struct Container {
    first: Chunk,
    /// The newest of the further runs, or [`END`].
    last: u32,
}

/// Marks the last run of a container.
const END: u32 = u32::MAX;

/// Maximum number of values and containers, of 16 bytes each, that one file may need together: half a GiB.
///
/// An entry of a dump with ten frames needs about 80 if it is not read in place, so this is at least 400,000 entries of
/// one rank.
pub(super) const MAX_CELLS: usize = 1 << 25;

/// An item that was read in place counts as this many cells, which are about as large as an `Entry`.
pub(super) const CELLS_OF_TAKEN: usize = 8;

/// A decoded pickle. Reading the next one reuses the memory of the last.
#[derive(Default)]
pub(in crate::publish) struct Pickle {
    pub(super) stack: Vec<Cell>,
    /// Heights of the stack at each open MARK.
    pub(super) marks: Vec<u32>,
    pub(super) memo: Vec<Cell>,
    pub(super) containers: Vec<Container>,
    chunks: Vec<Chunk>,
    pub(super) items: Vec<Cell>,
    /// How many items were read in place.
    pub(super) taken: usize,
    /// Whether a memo number was assigned twice. Then the same instruction need not denote the same value,
    /// which reading in place relies on.
    pub(super) renumbered: bool,
    /// The containers that were being filled when the input ended, ascending.
    incomplete: Vec<u64>,
}

impl Pickle {
    /// Removes everything and keeps the memory.
    pub(super) fn clear(&mut self) {
        self.stack.clear();
        self.marks.clear();
        self.memo.clear();
        self.containers.clear();
        self.chunks.clear();
        self.items.clear();
        self.incomplete.clear();
        self.taken = 0;
        self.renumbered = false;
    }

    /// Removes the values, and frees the memory of each table beyond `cells` values.
    pub(in crate::publish) fn shrink_to(&mut self, cells: usize) {
        self.stack.clear();
        self.items.clear();
        self.memo.clear();
        self.containers.clear();
        self.marks.clear();
        self.chunks.clear();
        self.incomplete.clear();
        self.stack.shrink_to(cells);
        self.items.shrink_to(cells);
        self.memo.shrink_to(cells);
        self.containers.shrink_to(cells);
        self.marks.shrink_to(cells);
        self.chunks.shrink_to(cells);
        self.incomplete.shrink_to(cells);
    }

    /// Number of containers, which are numbered from 0.
    pub(in crate::publish) fn container_count(&self) -> usize {
        self.containers.len()
    }

    /// The contents of a list, tuple or dict, in order.
    pub(in crate::publish) fn items(&self, container: u64) -> Items<'_> {
        Items {
            pickle: self,
            next: self
                .containers
                .get(container as usize)
                .map(|container| container.first),
        }
    }

    /// The contents of a list or tuple.
    pub(in crate::publish) fn list(&self, container: u64) -> impl Iterator<Item = Cell> + use<'_> {
        self.items(container).flatten().copied()
    }

    /// Keys and values of a dict.
    pub(in crate::publish) fn pairs(
        &self,
        container: u64,
    ) -> impl Iterator<Item = (Cell, Cell)> + use<'_> {
        let runs = self.items(container);
        runs.flat_map(|run| run.chunks_exact(2).map(|pair| (pair[0], pair[1])))
    }

    /// Whether nothing was put into this container yet.
    pub(super) fn is_empty(&self, container: u64) -> bool {
        self.containers[container as usize].first.len == 0
    }

    /// Whether the input ended while this container was being filled.
    pub(in crate::publish) fn is_incomplete(&self, container: u64) -> bool {
        self.incomplete.binary_search(&container).is_ok()
    }

    /// Puts a value on the stack; `TooLarge` if the file has too many of them.
    #[inline]
    pub(super) fn push(&mut self, cell: Cell, at: usize) -> Result<(), Fault> {
        if self.stack.len() == self.stack.capacity() {
            self.check_size(at)?;
        }
        self.stack.push(cell);
        Ok(())
    }

    /// Called before a table grows, which is rare: each growth doubles it.
    #[cold]
    pub(super) fn check_size(&self, at: usize) -> Result<(), Fault> {
        let cells = self.stack.len() + self.items.len() + self.memo.len() + self.marks.len();
        let cells = cells + self.taken * CELLS_OF_TAKEN;
        if cells + self.containers.len() + self.chunks.len() > MAX_CELLS {
            return Err(Fault::TooLarge { at });
        }
        Ok(())
    }

    /// Stores `cell` under this number in the memo.
    #[inline]
    pub(super) fn note(&mut self, slot: usize, cell: Cell, at: usize) -> Result<(), Fault> {
        if slot == self.memo.len() {
            if slot == self.memo.capacity() {
                self.check_size(at)?;
            }
            self.memo.push(cell);
            return Ok(());
        }
        // Every number takes at least two bytes of input, so a valid one is below the position.
        if slot > at {
            return Err(Fault::Damaged {
                what: "a memo number out of range",
                at,
            });
        }
        if slot > self.memo.len() {
            self.check_size(at)?;
            self.memo.resize(slot + 1, Cell::Unset);
        }
        self.renumbered |= self.memo[slot] != Cell::Unset;
        self.memo[slot] = cell;
        Ok(())
    }

    /// A new container, holding the last `len` items.
    pub(super) fn container(&mut self, len: usize, at: usize) -> Result<u64, Fault> {
        if self.containers.len() == self.containers.capacity() {
            self.check_size(at)?;
        }
        let id = self.containers.len() as u64;
        self.containers.push(Container {
            first: Chunk {
                start: (self.items.len() - len) as u32,
                len: len as u32,
                next: END,
            },
            last: END,
        });
        Ok(id)
    }

    /// Replaces the values from `from` on with a tuple of them.
    pub(super) fn tuple(&mut self, from: usize, at: usize) -> Result<(), Fault> {
        let len = self.stack.len() - from;
        if self.items.len() + len > self.items.capacity() {
            self.check_size(at)?;
        }
        self.items.extend_from_slice(&self.stack[from..]);
        self.stack.truncate(from);
        let tuple = Cell::List(self.container(len, at)?);
        self.push(tuple, at)
    }

    /// Moves the values from `from` on into the container below them.
    pub(super) fn extend(&mut self, from: usize, filling: Filling, at: usize) -> Result<(), Fault> {
        let len = self.stack.len() - from;
        let floor = self.marks.last().map_or(0, |&mark| mark as usize);
        let target = (from > floor).then(|| self.stack[from - 1]);
        let id = match (target, filling) {
            (Some(Cell::List(id)), Filling::List) => id,
            (Some(Cell::Dict(id)), Filling::Dict) if len.is_multiple_of(2) => id,
            _ => {
                return Err(Fault::Damaged {
                    what: "values without a container",
                    at,
                });
            }
        };
        self.fill(id, from, at)
    }

    /// Moves the values from `from` on into this container.
    pub(super) fn fill(&mut self, id: u64, from: usize, at: usize) -> Result<(), Fault> {
        let len = self.stack.len() - from;
        if self.items.len() + len > self.items.capacity() {
            self.check_size(at)?;
        }
        self.append(id, from, len);
        self.stack.truncate(from);
        Ok(())
    }

    /// Copies `len` values, from `from` on, to the end of this container.
    fn append(&mut self, id: u64, from: usize, len: usize) {
        if len == 0 {
            return;
        }
        let start = self.items.len() as u32;
        self.items.extend_from_slice(&self.stack[from..from + len]);
        let len = len as u32;
        let chunk = self.chunks.len() as u32;
        let container = &mut self.containers[id as usize];
        let first = &mut container.first;
        if first.len == 0 {
            (first.start, first.len) = (start, len);
            return;
        }
        if first.next == END && first.start + first.len == start {
            first.len += len;
            return;
        }
        match self.chunks.get_mut(container.last as usize) {
            Some(last) => last.next = chunk,
            None => first.next = chunk,
        }
        container.last = chunk;
        self.chunks.push(Chunk {
            start,
            len,
            next: END,
        });
    }

    /// After a fault: ends every list and dict that is open, innermost first. Returns the outermost value; `None` if
    /// there is none.
    pub(super) fn close_open_containers(&mut self) -> Option<Cell> {
        if let Some(&(Cell::List(id) | Cell::Dict(id))) = self.stack.last() {
            // An empty container may be complete or truncated; treat it as truncated.
            if self.is_empty(id) {
                self.incomplete.push(id);
            }
        }
        while let Some(mark) = self.marks.pop() {
            let mark = mark as usize;
            let len = self.stack.len().saturating_sub(mark);
            match mark.checked_sub(1).map(|below| self.stack[below]) {
                Some(Cell::List(id)) => {
                    self.incomplete.push(id);
                    self.append(id, mark, len);
                }
                Some(Cell::Dict(id)) => {
                    self.incomplete.push(id);
                    self.append(id, mark, len & !1);
                }
                _ => {}
            }
            self.stack.truncate(mark);
        }
        self.incomplete.sort_unstable();
        self.stack.first().copied()
    }
}

/// The kind of container to which an instruction adds values.
#[derive(Clone, Copy)]
pub(super) enum Filling {
    List,
    Dict,
}

/// The contents of one container, piece by piece: a piece is a run of cells.
pub(in crate::publish) struct Items<'a> {
    pickle: &'a Pickle,
    next: Option<Chunk>,
}

impl<'a> Iterator for Items<'a> {
    type Item = &'a [Cell];

    fn next(&mut self) -> Option<Self::Item> {
        let chunk = self.next?;
        self.next = self.pickle.chunks.get(chunk.next as usize).copied();
        let start = chunk.start as usize;
        Some(&self.pickle.items[start..start + chunk.len as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_every_table_beyond_the_limit_is_freed() {
        let mut pickle = Pickle {
            stack: Vec::with_capacity(1_000),
            marks: Vec::with_capacity(1_000),
            memo: Vec::with_capacity(1_000),
            containers: Vec::with_capacity(1_000),
            chunks: Vec::with_capacity(1_000),
            items: Vec::with_capacity(1_000),
            incomplete: Vec::with_capacity(1_000),
            ..Pickle::default()
        };
        pickle.shrink_to(10);
        let kept = [
            pickle.stack.capacity(),
            pickle.marks.capacity(),
            pickle.memo.capacity(),
            pickle.containers.capacity(),
            pickle.chunks.capacity(),
            pickle.items.capacity(),
            pickle.incomplete.capacity(),
        ];
        assert!(kept.iter().all(|&kept| kept < 1_000), "{kept:?}");
    }
}
