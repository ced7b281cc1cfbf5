//! Takes the terminal over, and restores it when the guard is dropped, even after a panic.

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{DisableMouseCapture, EnableMouseCapture};
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::crossterm::{cursor, execute};
use ratatui::layout::{Position, Rect};
use std::io::{self, Stdout, stdout};

/// Whether the mouse is captured. While it is, most terminals select text only with the shift key held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mouse {
    /// The terminal handles the mouse.
    Off,
    /// The program receives mouse events.
    #[default]
    On,
}

/// The terminal while this program draws on it.
pub struct Guard {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    mouse: Mouse,
}

impl Guard {
    /// Takes the terminal over: raw mode, the alternate screen, no cursor, and the mouse if `mouse` is on.
    ///
    /// # Errors
    ///
    /// If there is no terminal, it cannot be configured, or standard output cannot be written to.
    pub fn enter(mouse: Mouse) -> io::Result<Self> {
        let terminal = take(mouse).and_then(|()| Terminal::new(CrosstermBackend::new(stdout())));
        Ok(Self {
            terminal: terminal.inspect_err(|_| give_back())?,
            mouse,
        })
    }

    /// The terminal to draw on.
    pub fn terminal(&mut self) -> &mut Terminal<CrosstermBackend<Stdout>> {
        &mut self.terminal
    }

    /// Restores the terminal while `body` runs, then takes it over again.
    ///
    /// # Errors
    ///
    /// If the terminal cannot be taken over again, or cleared.
    pub fn lend(&mut self, body: impl FnOnce()) -> io::Result<()> {
        give_back();
        body();
        take(self.mouse)?;
        self.clear()
    }

    /// Clears the terminal, so that the next frame is drawn whole.
    ///
    /// # Errors
    ///
    /// If the size of the terminal is unknown, or writing to it fails.
    pub fn clear(&mut self) -> io::Result<()> {
        // `Terminal::clear` would query the cursor position, and the thread that reads keys would take
        // the answer for key presses.
        let size = self.terminal.size()?;
        self.terminal.resize(Rect::from((Position::ORIGIN, size)))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        give_back();
    }
}

/// Sets the modes that [`give_back`] resets.
fn take(mouse: Mouse) -> io::Result<()> {
    enable_raw_mode()?;
    execute!(stdout(), EnterAlternateScreen, cursor::Hide)?;
    if mouse == Mouse::On {
        execute!(stdout(), EnableMouseCapture)?;
    }
    Ok(())
}

/// Restores the terminal; harmless if it was not taken over. Errors are ignored, since callers cannot
/// act on them.
pub fn give_back() {
    let _ = execute!(
        stdout(),
        DisableMouseCapture,
        LeaveAlternateScreen,
        cursor::Show
    );
    let _ = disable_raw_mode();
}
