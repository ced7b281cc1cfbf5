//! The current screen and the navigation history.

use crate::page::table::Target;
use rcomm_analyzer::{Code, GroupRef};
use rcomm_recorder::model::Rank;
use std::sync::Arc;

/// A screen.
#[derive(Clone, Debug, PartialEq)]
pub enum Screen {
    /// Whether the job is stuck, the rank at fault, and since when.
    Overview,
    /// All groups; similar groups share a row.
    Groups,
    /// Some groups, one row each.
    GroupsOf(Arc<[Arc<GroupRef>]>),
    /// One group: the rank × sequence matrix.
    Group(Arc<GroupRef>),
    /// Ranks by host.
    Ranks,
    /// Some ranks, one row each.
    RanksOf(Arc<[Rank]>),
    /// One rank.
    Rank(Rank),
    /// Collectives and messages in flight.
    InFlight,
    /// Ranks that arrive late.
    Stragglers,
    /// Findings of the analysis and problems of its input.
    Warnings,
    /// The finding with this id, and its evidence.
    Finding(u32),
    /// What a code means, where it usually comes from, and what to do.
    Explained(Code),
    /// The operations of ranks over time.
    Timeline,
    /// The causal chain of the target, or of the whole hang.
    Why(Option<Target>),
    /// Call stacks.
    Stacks,
    /// Marked ranks side by side.
    Compare,
    /// The sources and their status.
    Sources,
    /// The jobs of this node.
    Jobs,
    /// The times of each rank's newest step of data-parallel training.
    Reducer,
    /// Help: keys, filter terms, commands, words and marks.
    Help,
}

/// The screens of the number keys and of `:`, with their names.
pub const VIEWS: &[(Screen, &str)] = &[
    (Screen::Overview, "overview"),
    (Screen::Groups, "groups"),
    (Screen::Ranks, "ranks"),
    (Screen::InFlight, "inflight"),
    (Screen::Stragglers, "stragglers"),
    (Screen::Warnings, "warnings"),
    (Screen::Timeline, "timeline"),
    (Screen::Sources, "sources"),
    (Screen::Jobs, "jobs"),
    (Screen::Reducer, "reducer"),
];

impl Screen {
    /// The screen of a number key, from 1, where 10 is the key 0; `None` if the key has none.
    pub fn numbered(number: u8) -> Option<Self> {
        let index = usize::from(number).checked_sub(1)?;
        VIEWS.get(index).map(|(screen, _)| screen.clone())
    }

    /// Whether a number key opens the screen; the others are details.
    pub fn is_view(&self) -> bool {
        VIEWS.iter().any(|(screen, _)| screen == self)
    }

    /// The screen that shows `target` when it is opened. For a job this is the first screen.
    pub fn of(target: &Target) -> Self {
        match target {
            Target::Job(_) => Self::Overview,
            Target::Group(group) => Self::Group(group.clone()),
            Target::Groups(groups) => match groups.as_ref() {
                [group] => Self::Group(group.clone()),
                _ => Self::GroupsOf(groups.clone()),
            },
            Target::Rank(rank) => Self::Rank(*rank),
            Target::Ranks(ranks) => match ranks.as_ref() {
                [rank] => Self::Rank(*rank),
                _ => Self::RanksOf(ranks.clone()),
            },
            Target::Finding(id) => Self::Finding(*id),
        }
    }

    /// The screen one level up; `None` at the top.
    pub fn parent(&self) -> Option<Self> {
        match self {
            Self::Overview => None,
            Self::Group(_) | Self::GroupsOf(_) => Some(Self::Groups),
            Self::Rank(_) | Self::RanksOf(_) => Some(Self::Ranks),
            Self::Finding(_) | Self::Explained(_) => Some(Self::Warnings),
            _ => Some(Self::Overview),
        }
    }

    /// Key under which screens share selection and order: one per kind.
    pub fn kind(&self) -> std::mem::Discriminant<Self> {
        std::mem::discriminant(self)
    }
}

/// Navigation history.
#[derive(Clone, Debug)]
pub struct Navigation {
    /// The history, oldest first.
    visited: Vec<Screen>,
    /// Index of the current screen in the history.
    current: usize,
    /// The screen shown before the current one.
    last: Option<Screen>,
}

impl Default for Navigation {
    fn default() -> Self {
        Self {
            visited: vec![Screen::Overview],
            current: 0,
            last: None,
        }
    }
}

impl Navigation {
    /// Maximum number of remembered screens.
    const DEPTH: usize = 64;

    /// The current screen.
    pub fn screen(&self) -> &Screen {
        &self.visited[self.current]
    }

    /// Goes to a screen; no effect if it is the current one. The screens ahead in the history are forgotten, and so is
    /// the oldest if there are more than `DEPTH`.
    pub fn go(&mut self, screen: Screen) {
        if *self.screen() == screen {
            return;
        }
        self.last = Some(self.screen().clone());
        self.visited.truncate(self.current + 1);
        self.visited.push(screen);
        if self.visited.len() > Self::DEPTH {
            self.visited.remove(0);
        }
        self.current = self.visited.len() - 1;
    }

    /// Goes one level up: details return to the screen that they were opened on, other screens to their parent. Returns
    /// false at the top.
    pub fn up(&mut self) -> bool {
        let before = self
            .current
            .checked_sub(1)
            .map(|index| self.visited[index].clone());
        match (self.screen().parent(), before) {
            (None, _) => false,
            // A screen without a number key is closed: the screen on which it was opened is shown again.
            (Some(_), Some(before)) if self.is_detail() => {
                self.last = Some(self.screen().clone());
                self.visited.truncate(self.current);
                self.current -= 1;
                debug_assert_eq!(*self.screen(), before);
                true
            }
            (Some(parent), _) => {
                self.go(parent);
                true
            }
        }
    }

    /// The current screen and, if it is a detail, the screens on which it was opened, back to the view on which the
    /// first detail was opened: at most four screens.
    pub fn trail(&self) -> impl Iterator<Item = &Screen> {
        let back = self.visited[..=self.current].iter().rev();
        let mut ended = false;
        back.take(4).take_while(move |screen| {
            let shown = !ended;
            ended |= screen.is_view();
            shown
        })
    }

    fn is_detail(&self) -> bool {
        !self.screen().is_view()
    }

    /// Goes to the previous screen in the history; no effect on the first.
    pub fn back(&mut self) {
        if self.current > 0 {
            self.last = Some(self.screen().clone());
            self.current -= 1;
        }
    }

    /// Goes to the next screen in the history; no effect on the last.
    pub fn forward(&mut self) {
        if self.current + 1 < self.visited.len() {
            self.last = Some(self.screen().clone());
            self.current += 1;
        }
    }

    /// Toggles between the last two screens.
    pub fn swap(&mut self) {
        if let Some(last) = self.last.take() {
            self.go(last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn up_closes_a_detail_and_leads_from_a_view_to_its_parent() {
        let mut nav = Navigation::default();
        nav.go(Screen::InFlight);
        nav.go(Screen::Rank(3));
        assert!(nav.up());
        assert_eq!(*nav.screen(), Screen::InFlight);
        assert!(nav.up());
        assert_eq!(*nav.screen(), Screen::Overview);
        assert!(!nav.up());
    }

    #[test]
    fn history_goes_back_forward_and_to_the_last() {
        let mut nav = Navigation::default();
        nav.go(Screen::Groups);
        nav.go(Screen::Ranks);
        nav.back();
        assert_eq!(*nav.screen(), Screen::Groups);
        nav.forward();
        assert_eq!(*nav.screen(), Screen::Ranks);
        nav.swap();
        assert_eq!(*nav.screen(), Screen::Groups);
        nav.swap();
        assert_eq!(*nav.screen(), Screen::Ranks);
    }

    #[test]
    fn the_trail_of_a_detail_begins_at_its_view() {
        let mut nav = Navigation::default();
        let trail = |nav: &Navigation| nav.trail().cloned().collect::<Vec<_>>();
        assert_eq!(trail(&nav), [Screen::Overview]);
        nav.go(Screen::Warnings);
        assert_eq!(trail(&nav), [Screen::Warnings]);
        nav.go(Screen::Finding(1));
        nav.go(Screen::Rank(2));
        let opened = [Screen::Rank(2), Screen::Finding(1), Screen::Warnings];
        assert_eq!(trail(&nav), opened);
        nav.up();
        assert_eq!(trail(&nav), opened[1..]);
    }

    #[test]
    fn the_history_is_bounded() {
        let mut nav = Navigation::default();
        for rank in 0..1000 {
            nav.go(Screen::Rank(rank));
        }
        assert_eq!(nav.visited.len(), Navigation::DEPTH);
        assert_eq!(*nav.screen(), Screen::Rank(999));
    }
}
