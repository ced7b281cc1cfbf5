//! [`Hints`]: what the caller of an operation knows and the backend can use.

use std::sync::Arc;

/// A name and its value.
type Pair = (Box<str>, Box<str>);

/// Facts that the caller of an operation knows and its backend cannot determine.
///
/// They are set on a group when it is made ([`GroupOptions::hints`](crate::GroupOptions::hints)), or on one handle of
/// it ([`ProcessGroup::hinted`](crate::ProcessGroup::hinted)), and passed to the backend with each
/// [`Call`](crate::backend::Call). A hint changes how an operation is carried out, never its result; ranks may give
/// different hints. A backend uses the hints that it supports, and its documentation lists them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Hints {
    /// How long the wait for other ranks will be.
    pub wait: WaitHint,
    /// Names and values for a backend that the program itself supplies; `None` if there are none. A call shares them
    /// with the handle: it copies and allocates nothing.
    own: Option<Arc<[Pair]>>,
}

impl Hints {
    /// No hints.
    pub const NONE: Self = Self {
        wait: WaitHint::Unknown,
        own: None,
    };

    /// These hints, with `wait` as the hint about waiting.
    #[must_use]
    pub const fn wait(mut self, wait: WaitHint) -> Self {
        self.wait = wait;
        self
    }

    /// These hints, with these names and values, which are copied, for a backend that the program itself supplies,
    /// instead of those given before.
    #[must_use]
    pub fn own(mut self, own: &[(&str, &str)]) -> Self {
        let pairs = own.iter().map(|&(name, value)| (name.into(), value.into()));
        self.own = (!own.is_empty()).then(|| pairs.collect());
        self
    }

    /// The names and values for a backend that the program itself supplies.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        let pairs = self.own.iter().flat_map(|own| own.iter());
        pairs.map(|(name, value)| (&**name, &**value))
    }

    /// The first value of `name` among [`pairs`](Self::pairs); `None` if it is not there.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.pairs()
            .find(|&(known, _)| known == name)
            .map(|(_, value)| value)
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
        let lane = 3.to_string();
        let copied = Hints::NONE.own(&[("lane", &lane)]);
        assert_eq!(copied.get("lane"), Some("3"));
        assert_eq!(copied.pairs().collect::<Vec<_>>(), [("lane", "3")]);
        assert_eq!(copied.own(&[]), Hints::NONE);
        assert_eq!(Hints::default(), Hints::NONE);
    }
}
