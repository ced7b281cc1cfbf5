//! Finds out whether the terminal's background is light, and recognizes the terminal's answer if it comes late.
//!
//! The terminal is asked for its background (OSC 11), and then for its attributes (DA1). Not every terminal answers the
//! first question, but nearly every terminal answers the second: after that answer, the first is no longer awaited.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::crossterm::terminal::{disable_raw_mode, enable_raw_mode};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io::{self, Write as _, stdout};
use std::time::{Duration, Instant};

/// The longest time that a terminal may take to answer. Keys typed during that time are lost.
const DEADLINE: Duration = Duration::from_millis(300);

/// OSC 11 and DA1.
const QUESTION: &[u8] = b"\x1b]11;?\x1b\\\x1b[c";

/// Whether the background of the terminal is light. If the terminal does not report it, `colorfgbg`, the value of
/// `COLORFGBG`, decides; `None` if neither does. Blocks for at most 300 ms.
///
/// Standard input and output must be a terminal that no other thread reads.
pub fn is_light(colorfgbg: Option<&str>) -> Option<bool> {
    let answer = ask().unwrap_or_default();
    light_in_answer(&answer).or_else(|| light_in_colorfgbg(colorfgbg?))
}

/// Asks the terminal, and returns what it answered before the deadline.
fn ask() -> io::Result<Vec<u8>> {
    enable_raw_mode()?;
    let answer = ask_raw();
    disable_raw_mode()?;
    answer
}

/// Asks while the terminal is in raw mode, so that the answer needs no end of line and is not displayed.
fn ask_raw() -> io::Result<Vec<u8>> {
    let mut out = stdout().lock();
    out.write_all(QUESTION)?;
    out.flush()?;
    let stdin = rustix::stdio::stdin();
    let deadline = Instant::now() + DEADLINE;
    let mut answer = Vec::new();
    while !is_complete(&answer) {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut watched = [PollFd::new(&stdin, PollFlags::IN)];
        let left = Timespec::try_from(left).map_err(io::Error::other)?;
        match rustix::event::poll(&mut watched, Some(&left)) {
            Ok(0) => break,
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let mut piece = [0; 256];
        match rustix::io::read(stdin, &mut piece)? {
            0 => break,
            n => answer.extend_from_slice(&piece[..n]),
        }
    }
    Ok(answer)
}

/// Whether the answer to the second question, `ESC [ ? ... c`, is there.
fn is_complete(answer: &[u8]) -> bool {
    let start = answer.windows(3).position(|three| three == b"\x1b[?");
    start.is_some_and(|start| answer[start..].contains(&b'c'))
}

/// Whether the color in `ESC ] 11 ; rgb:RRRR/GGGG/BBBB` is light; each component has one to four hexadecimal digits.
/// `None` if there is no such color.
fn light_in_answer(answer: &[u8]) -> Option<bool> {
    let text = String::from_utf8_lossy(answer);
    let (_, color) = text.split_once("\x1b]11;rgb:")?;
    let end = color.find(['\x1b', '\x07'])?;
    let mut components = color[..end].split('/').map(|digits| {
        let value = u32::from_str_radix(digits, 16).ok()?;
        let max = match digits.len() {
            1..=4 => (1_u32 << (4 * digits.len())) - 1,
            _ => return None,
        };
        Some(f64::from(value) / f64::from(max))
    });
    let mut next = || components.next().flatten();
    let (red, green, blue) = (next()?, next()?, next()?);
    // The luma of BT.601.
    Some(0.299 * red + 0.587 * green + 0.114 * blue > 0.5)
}

/// Whether the background in `colorfgbg` is light: the last field of `foreground;background` or
/// `foreground;default;background`. Of the sixteen colors, 7 and those from 9 are light. `None` if the field is none of
/// them.
fn light_in_colorfgbg(colorfgbg: &str) -> Option<bool> {
    let background: u8 = colorfgbg.rsplit(';').next()?.trim().parse().ok()?;
    (background < 16).then_some(matches!(background, 7 | 9..))
}

/// Recognizes an answer to OSC 11 that comes after the deadline. It arrives as key presses: alt-], its characters, and
/// ctrl-g or alt-\ at the end.
#[derive(Debug, Default)]
pub(super) struct LateAnswer {
    /// When its newest character came; `None` outside an answer.
    newest: Option<Instant>,
}

impl LateAnswer {
    /// The longest time between two characters of an answer.
    const GAP: Duration = Duration::from_millis(100);

    /// Notes a key press at `now`, and returns whether it is part of an answer. If not, it is the user's.
    pub(super) fn includes(&mut self, key: &KeyEvent, now: Instant) -> bool {
        let is_pressed =
            |modifier, code| key.modifiers == modifier && key.code == KeyCode::Char(code);
        let goes_on = |newest: Instant| now.duration_since(newest) < Self::GAP;
        let inside = self.newest.is_some_and(goes_on);
        let is_end = is_pressed(KeyModifiers::ALT, '\\') || is_pressed(KeyModifiers::CONTROL, 'g');
        let included = inside || is_pressed(KeyModifiers::ALT, ']');
        self.newest = (included && !(inside && is_end)).then_some(now);
        included
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_after_the_deadline_is_no_key_press() {
        let start = Instant::now();
        let key = |modifiers, code| KeyEvent::new(KeyCode::Char(code), modifiers);
        let mut late = LateAnswer::default();
        let mut includes = |modifiers, code, ms| {
            late.includes(&key(modifiers, code), start + Duration::from_millis(ms))
        };
        assert!(!includes(KeyModifiers::NONE, '1', 0));
        assert!(includes(KeyModifiers::ALT, ']', 1));
        assert!(includes(KeyModifiers::NONE, '1', 2));
        assert!(includes(KeyModifiers::NONE, 'q', 50));
        assert!(includes(KeyModifiers::ALT, '\\', 51));
        assert!(!includes(KeyModifiers::NONE, '1', 52));
        // Without an end, the answer is over at the first pause.
        assert!(includes(KeyModifiers::ALT, ']', 1000));
        assert!(!includes(KeyModifiers::NONE, 'q', 1100));
        assert!(!includes(KeyModifiers::NONE, 'q', 1101));
    }

    #[test]
    fn the_color_that_a_terminal_answers_is_light_or_dark() {
        let light = |answer: &str| light_in_answer(answer.as_bytes());
        assert_eq!(
            light("\x1b]11;rgb:ffff/ffff/ffff\x1b\\\x1b[?62c"),
            Some(true)
        );
        assert_eq!(light("\x1b]11;rgb:fdfd/f6f6/e3e3\x07"), Some(true));
        assert_eq!(light("\x1b]11;rgb:0000/2b2b/3636\x1b\\"), Some(false));
        assert_eq!(light("\x1b]11;rgb:f/f/f\x07"), Some(true));
        // Pure blue has the brightness of a dark grey.
        assert_eq!(light("\x1b]11;rgb:00/00/ff\x07"), Some(false));
        for unknown in [
            "",
            "\x1b[?62c",
            "\x1b]11;rgb:ff/ff\x07",
            "\x1b]11;rgb:xx/ff/ff\x07",
            "\x1b]11;rgb:ffff/ffff/ff",
        ] {
            assert_eq!(light(unknown), None, "{unknown:?}");
        }
    }

    #[test]
    fn an_answer_is_complete_with_the_attributes() {
        assert!(is_complete(b"\x1b]11;rgb:00/00/cc\x07\x1b[?62;22c"));
        assert!(is_complete(b"\x1b[?6c"));
        assert!(!is_complete(b"\x1b]11;rgb:00/00/cc\x07"));
        assert!(!is_complete(b"\x1b]11;rgb:00/00/cc\x07\x1b[?62"));
    }

    #[test]
    fn the_variable_names_the_background_last() {
        assert_eq!(light_in_colorfgbg("0;15"), Some(true));
        assert_eq!(light_in_colorfgbg("0;default;7"), Some(true));
        assert_eq!(light_in_colorfgbg("15;0"), Some(false));
        assert_eq!(light_in_colorfgbg("15;8"), Some(false));
        assert_eq!(light_in_colorfgbg("15;default"), None);
        assert_eq!(light_in_colorfgbg(""), None);
        assert_eq!(light_in_colorfgbg("0;99"), None);
    }
}
