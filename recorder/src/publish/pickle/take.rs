//! Passes on the items of one long list as they are read.

use super::cell::Cell;
use super::graph::{CELLS_OF_TAKEN, MAX_CELLS, Pickle};

/// Consumes the items of one list as they are read, so that they are not kept.
pub(in crate::publish) trait Taker {
    /// Whether the taker wants the list under this key of the outermost dict.
    fn wants(&self, key: &[u8]) -> bool;

    /// Takes the next item, which the machine has read. It may be of any kind.
    fn take(&mut self, pickle: &Pickle, item: Cell);

    /// Reads the item at `at` in place by a [`Cursor`](super::Cursor), and returns where it ends. `None` if
    /// the item is in any way unusual: the taker must then drop whatever it stored of the item, which the machine
    /// reads and passes to [`Taker::take`].
    fn read(&mut self, pickle: &mut Pickle, input: &[u8], at: usize) -> Option<usize>;
}

impl Pickle {
    /// Whether `taker` gets the items of the list on top of the stack: the list is still empty, and `taker` wants its
    /// key in the outermost dict.
    pub(super) fn is_wanted(&self, input: &[u8], taker: &impl Taker) -> bool {
        let [Cell::Dict(_), pairs @ ..] = &self.stack[..] else {
            return false;
        };
        let [.., Cell::Text(key), Cell::List(list)] = pairs else {
            return false;
        };
        self.marks == [1]
            && pairs.len().is_multiple_of(2)
            && self.is_empty(*list)
            && taker.wants(key.bytes_in(input))
    }

    /// Gives `taker` all items since the last MARK, and lets it read what follows. Returns the position at which the
    /// taker stopped.
    pub(super) fn hand_over(
        &mut self,
        input: &[u8],
        mut at: usize,
        taker: &mut impl Taker,
    ) -> usize {
        let from = self.marks.last().map_or(0, |&mark| mark as usize);
        for item in from..self.stack.len() {
            taker.take(self, self.stack[item]);
        }
        self.stack.truncate(from);
        while self.taken < MAX_CELLS / CELLS_OF_TAKEN && !self.renumbered {
            let (memo, containers, items) =
                (self.memo.len(), self.containers.len(), self.items.len());
            let Some(end) = taker.read(self, input, at) else {
                self.stack.truncate(from);
                self.memo.truncate(memo);
                self.containers.truncate(containers);
                self.items.truncate(items);
                break;
            };
            at = end;
            self.taken += 1;
        }
        at
    }
}
