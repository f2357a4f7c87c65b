//! Bodies that are slow, cut or wrong.
//!
//! Owns what a fault does to bytes on their way, in either direction, and counts them for the
//! log. Does not choose the fault.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::log::Ticket;

/// Pieces a second of a body whose rate is limited.
const PIECES_PER_S: u64 = 50;

/// Why a body or a request ended early: hyper then closes the connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Broken {
    /// A fault said so.
    #[error("closed by a fault")]
    ByFault,
    /// The other side left, or sent nonsense.
    #[error("{0}")]
    ByError(String),
}

impl Broken {
    pub(crate) fn by(error: impl std::fmt::Display) -> Self {
        Self::ByError(error.to_string())
    }
}

/// What happens to the bytes.
#[derive(Debug, Default)]
pub(crate) struct Shape {
    pub rate_bytes_per_s: Option<u64>,
    pub corrupt_at: Option<u64>,
    pub cut_after: Option<Cut>,
}

/// Where to cut, and how to know that the bytes before it are out.
#[derive(Debug)]
pub(crate) struct Cut {
    pub bytes: u64,
    pub flushes: Option<watch::Receiver<u64>>,
}

/// Which of an entry's counters these bytes belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Request,
    Response,
}

type Flushed = Pin<Box<dyn Future<Output = ()> + Send>>;

/// See the module.
pub(crate) struct Shaped<B> {
    inner: B,
    side: Side,
    ticket: Arc<Ticket>,
    rate: Option<u64>,
    corrupt_at: Option<u64>,
    cut_at: Option<u64>,
    flushes: Option<watch::Receiver<u64>>,
    flushed: Option<Flushed>,
    rest: Bytes,
    position: u64,
    length: Option<u64>,
    pause: Option<Pin<Box<Sleep>>>,
    /// When the first piece of a body with a rate went out.
    begun: Option<Instant>,
}

impl<B: Body<Data = Bytes>> Shaped<B> {
    pub(crate) fn new(inner: B, side: Side, ticket: Arc<Ticket>, shape: Shape) -> Self {
        let length = inner.size_hint().exact();
        let (cut_at, flushes) = match shape.cut_after {
            Some(cut) => (Some(cut.bytes), cut.flushes),
            None => (None, None),
        };
        let ended = inner.is_end_stream();
        let body = Self {
            inner,
            side,
            ticket,
            rate: shape.rate_bytes_per_s.map(|rate| rate.max(1)),
            corrupt_at: shape.corrupt_at,
            cut_at,
            flushes,
            flushed: None,
            rest: Bytes::new(),
            position: 0,
            length,
            pause: None,
            begun: None,
        };
        if ended {
            body.finish();
        }
        body
    }

    fn finish(&self) {
        if self.side == Side::Response {
            self.ticket.answered();
        }
    }

    fn is_cut(&self) -> bool {
        self.cut_at.is_some_and(|at| self.position >= at)
            && self.length.is_none_or(|length| self.position < length)
    }

    /// Ready once the bytes before the cut have left for the client.
    fn poll_flushed(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(flushed) = &mut self.flushed else {
            let Some(mut flushes) = self.flushes.take() else {
                return Poll::Ready(());
            };
            // hyper flushes after this poll says pending, so the next flush covers all bytes.
            flushes.borrow_and_update();
            self.flushed = Some(Box::pin(async move {
                let _ = flushes.changed().await;
            }));
            return self.poll_flushed(cx);
        };
        flushed.as_mut().poll(cx)
    }

    /// Takes the next piece off the rest, shaped.
    fn piece(&mut self) -> Bytes {
        let mut take = self.rest.len() as u64;
        if let Some(rate) = self.rate {
            take = take.min((rate / PIECES_PER_S).max(1));
            // Counted from the body's first piece, so that late timers do not add up.
            let begun = *self.begun.get_or_insert_with(Instant::now);
            let sent_bytes = self.position.saturating_add(take);
            let due = begun + Duration::from_secs_f64(sent_bytes as f64 / rate as f64);
            self.pause = Some(Box::pin(sleep_until(due)));
        }
        if let Some(at) = self.cut_at {
            take = take.min(at.saturating_sub(self.position));
        }
        let mut piece = self.rest.split_to(
            usize::try_from(take)
                .unwrap_or(usize::MAX)
                .min(self.rest.len()),
        );
        if let Some(at) = self.corrupt_at.and_then(|at| at.checked_sub(self.position))
            && at < piece.len() as u64
        {
            let mut changed = BytesMut::from(&piece[..]);
            if let Some(byte) = usize::try_from(at).ok().and_then(|at| changed.get_mut(at)) {
                *byte = !*byte;
            }
            piece = changed.freeze();
        }
        self.position += piece.len() as u64;
        let count = piece.len() as u64;
        let side = self.side;
        self.ticket.update(|entry| match side {
            Side::Request => entry.request_bytes += count,
            Side::Response => entry.response_bytes += count,
        });
        if self.length.is_some_and(|length| self.position >= length) {
            self.finish();
        }
        piece
    }
}

impl<B> Body for Shaped<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: std::fmt::Display,
{
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        loop {
            if self.is_cut() {
                return self.poll_flushed(cx).map(|()| Some(Err(Broken::ByFault)));
            }
            if let Some(pause) = &mut self.pause {
                match pause.as_mut().poll(cx) {
                    Poll::Ready(()) => self.pause = None,
                    Poll::Pending => return Poll::Pending,
                }
            }
            if !self.rest.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(self.piece()))));
            }
            match Pin::new(&mut self.inner).poll_frame(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => {
                    self.finish();
                    return Poll::Ready(None);
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(Broken::by(error)))),
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        !self.is_cut() && self.rest.is_empty() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        match self.length {
            Some(length) => SizeHint::with_exact(length.saturating_sub(self.position)),
            None => SizeHint::default(),
        }
    }
}
