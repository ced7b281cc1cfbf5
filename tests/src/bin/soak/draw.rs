//! Draws what a round does from the seed and the number of the round.

use std::fmt;

/// Random numbers from a seed (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct Draw(u64);

impl Draw {
    /// A sequence of random numbers that depends on all parts of the seed.
    pub(crate) fn of(parts: &[u64]) -> Self {
        let mut draw = Self(0);
        for &part in parts {
            draw.0 ^= part;
            // The number that is drawn becomes the state: otherwise seeds that differ in a few bits would have the same
            // rounds in another order.
            draw.0 = draw.next();
        }
        draw
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    /// A number below `limit`, which is not 0.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// One of these values, of which there is at least one.
    pub(crate) fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len() as u64) as usize]
    }
}

/// What a rank does to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Kill,
    Freeze,
    Exit,
}

/// A fault: the rank, the step in which it happens, and what the rank does.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fault {
    pub(crate) rank: u32,
    pub(crate) step: u64,
    pub(crate) act: Act,
}

/// A rank that is started later than the others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Late {
    pub(crate) rank: u32,
    pub(crate) ms: u64,
}

/// How the launcher of a round ends, and in which step of rank 0.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LauncherFault {
    pub(crate) step: u64,
    pub(crate) end: LauncherEnd,
}

/// The signal that ends a launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LauncherEnd {
    Kill,
    Terminate,
    Interrupt,
}

/// One round.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) round: u64,
    pub(crate) ranks: u32,
    pub(crate) transport: &'static str,
    pub(crate) steps: u64,
    pub(crate) fault: Option<Fault>,
    pub(crate) late: Option<Late>,
    /// If there is one, `rcomm-run` starts the ranks, and ends in this way.
    pub(crate) launcher: Option<LauncherFault>,
}

impl Plan {
    pub(crate) fn of(seed: u64, round: u64) -> Self {
        let mut draw = Draw::of(&[seed, round]);
        let ranks = 2 + draw.below(4) as u32;
        let transport = draw.one_of(&["shm", "tcp"]);
        let steps = 50 + draw.below(250);
        let fault = (draw.below(3) == 0).then(|| Fault {
            rank: draw.below(ranks.into()) as u32,
            step: draw.below(steps),
            act: draw.one_of(&[Act::Kill, Act::Freeze, Act::Exit]),
        });
        let mut draw = Draw::of(&[seed, round, 3]);
        let launcher = (draw.below(8) == 0).then(|| LauncherFault {
            step: draw.below(steps),
            end: draw.one_of(&[
                LauncherEnd::Kill,
                LauncherEnd::Terminate,
                LauncherEnd::Interrupt,
            ]),
        });
        let late = (draw.below(4) == 0).then(|| Late {
            rank: draw.below(ranks.into()) as u32,
            ms: draw.below(3_000),
        });
        Self {
            seed,
            round,
            ranks,
            transport,
            steps,
            fault: fault.filter(|_| launcher.is_none()),
            late: late.filter(|_| launcher.is_none()),
            launcher,
        }
    }

    /// A round of a job with many rounds: all rounds of a seed have the same ranks and transport, and no fault.
    pub(crate) fn of_long_job(seed: u64, round: u64) -> Self {
        let transport = Draw::of(&[seed]).one_of(&["shm", "tcp"]);
        let steps = 20 + Draw::of(&[seed, round]).below(80);
        Self {
            seed,
            round,
            ranks: 4,
            transport,
            steps,
            fault: None,
            late: None,
            launcher: None,
        }
    }

    /// The members of the groups besides the world: each with at least two ranks, ascending.
    pub(crate) fn groups(&self) -> Vec<Vec<u32>> {
        let mut draw = Draw::of(&[self.seed, self.round, 1]);
        let count = 1 + draw.below(3);
        let group = |_| {
            let mut ranks: Vec<u32> = (0..self.ranks).collect();
            while ranks.len() > 2 && draw.below(2) == 0 {
                let at = draw.below(ranks.len() as u64);
                ranks.remove(at as usize);
            }
            ranks
        };
        (0..count).map(group).collect()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            ranks,
            transport,
            steps,
            ..
        } = self;
        write!(f, "{ranks} ranks, {transport}, {steps} steps")?;
        if let Some(Fault { rank, step, act }) = &self.fault {
            write!(f, ", {act:?} of rank {rank} in step {step}")?;
        }
        if let Some(Late { rank, ms }) = &self.late {
            write!(f, ", rank {rank} late by {ms} ms")?;
        }
        if let Some(LauncherFault { step, end }) = &self.launcher {
            write!(f, ", {end:?} of the launcher in step {step}")?;
        }
        Ok(())
    }
}
