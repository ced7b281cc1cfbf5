//! [`Hints`]: what the caller of an operation knows and the backend can use.

/// Facts that the caller of an operation knows and its backend cannot determine.
///
/// They are set on one handle of a group ([`ProcessGroup::hinted`](crate::ProcessGroup::hinted)) and passed to the
/// backend with each [`Call`](crate::backend::Call). A hint changes how an operation is carried out, never its
/// result; ranks may give different hints. A backend uses the hints that it supports, and its documentation lists
/// them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Hints {
    /// How long the wait for other ranks will be.
    pub wait: WaitHint,
    /// Names and values for a backend that the program itself supplies.
    pub own: &'static [(&'static str, &'static str)],
}

impl Hints {
    /// No hints.
    pub const NONE: Self = Self {
        wait: WaitHint::Unknown,
        own: &[],
    };

    /// These hints, with `wait` as the hint about waiting.
    #[must_use]
    pub const fn wait(self, wait: WaitHint) -> Self {
        Self { wait, ..self }
    }

    /// These hints, with these names and values for a backend that the program itself supplies.
    #[must_use]
    pub const fn own(self, own: &'static [(&'static str, &'static str)]) -> Self {
        Self { own, ..self }
    }

    /// The value of `name` in the field `own`; `None` if it is not there.
    pub fn get(&self, name: &str) -> Option<&'static str> {
        let mut own = self.own.iter();
        own.find(|(known, _)| *known == name)
            .map(|(_, value)| *value)
    }
}

/// How long the wait for other ranks will be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WaitHint {
    /// The backend decides by the numbers of cores and ranks of the host.
    #[default]
    Unknown,
    /// The others are about to arrive: poll without yielding the core, even where ranks outnumber cores.
    Short,
    /// The others may take long (one of them writes a checkpoint): sleep at once, and leave the core to
    /// threads that compute.
    Long,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn get_returns_the_value_of_a_name() {
        let hints = Hints::NONE.own(&[("lane", "2"), ("trace", "on")]);
        assert_eq!(hints.get("trace"), Some("on"));
        assert_eq!(hints.get("other"), None);
        assert_eq!(Hints::default(), Hints::NONE);
    }
}
