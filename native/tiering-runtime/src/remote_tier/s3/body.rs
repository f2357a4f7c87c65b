//! The body of a streamed PUT, and the watch over its progress.
//!
//! Owns the framing towards the HTTP client and the promise of an exact length. Does not own where the bytes come from.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::Instant;

use crate::remote_tier::{BodyFrames, StoreError, StoreErrorKind};

/// When bytes last moved in one request.
#[derive(Debug)]
pub(super) struct Progress {
    started: Instant,
    last_ms: AtomicU64,
}

impl Progress {
    pub(super) fn start() -> Arc<Self> {
        Arc::new(Self {
            started: Instant::now(),
            last_ms: AtomicU64::new(0),
        })
    }

    /// Bytes moved now.
    pub(super) fn touch(&self) {
        let elapsed_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_ms.store(elapsed_ms, Ordering::Relaxed);
    }

    /// Runs `work`, and gives it up once nothing has moved for `limit`: a large object over a slow line takes its time,
    /// a dead one does not.
    pub(super) async fn guard<T, F>(&self, limit: Duration, work: F) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, StoreError>>,
    {
        let mut work = std::pin::pin!(work);
        loop {
            let last = Duration::from_millis(self.last_ms.load(Ordering::Relaxed));
            let deadline = self.started + last + limit;
            tokio::select! {
                biased;
                outcome = &mut work => return outcome,
                () = tokio::time::sleep_until(deadline) => {
                    if self.last_ms.load(Ordering::Relaxed) == u64::try_from(last.as_millis()).unwrap_or(u64::MAX) {
                        let text = format!("nothing moved for {} ms", limit.as_millis());
                        return Err(StoreError::new(StoreErrorKind::Timeout, text));
                    }
                }
            }
        }
    }
}

/// Frames as an HTTP body that has exactly the length that was announced.
pub(super) struct FramedBody {
    frames: BodyFrames,
    remaining_bytes: u64,
    progress: Arc<Progress>,
}

impl FramedBody {
    pub(super) fn new(frames: BodyFrames, len_bytes: u64, progress: Arc<Progress>) -> Self {
        Self {
            frames,
            remaining_bytes: len_bytes,
            progress,
        }
    }
}

impl Body for FramedBody {
    type Data = Bytes;
    type Error = StoreError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StoreError>>> {
        let wrong_length = |text: &str| Some(Err(StoreError::new(StoreErrorKind::LocalRead, text)));
        Poll::Ready(match ready!(self.frames.poll_recv(cx)) {
            Some(Ok(bytes)) => match self.remaining_bytes.checked_sub(bytes.len() as u64) {
                Some(remaining_bytes) => {
                    self.remaining_bytes = remaining_bytes;
                    self.progress.touch();
                    Some(Ok(Frame::data(bytes)))
                }
                None => wrong_length("the body is longer than announced"),
            },
            Some(Err(error)) => Some(Err(error)),
            None if self.remaining_bytes == 0 => None,
            None => wrong_length("the body is shorter than announced"),
        })
    }

    fn is_end_stream(&self) -> bool {
        self.remaining_bytes == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.remaining_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::sync::mpsc;

    use super::*;

    async fn drain(
        frames: Vec<Result<Bytes, StoreError>>,
        len_bytes: u64,
    ) -> Result<u64, StoreError> {
        let (sender, receiver) = mpsc::channel(frames.len().max(1));
        for frame in frames {
            sender.send(frame).await.expect("room for all");
        }
        drop(sender);
        let mut body = FramedBody::new(receiver, len_bytes, Progress::start());
        let mut seen = 0;
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            seen += frame?.into_data().map_or(0, |data| data.len() as u64);
        }
        Ok(seen)
    }

    #[tokio::test]
    async fn the_length_is_what_was_announced_or_an_error() {
        let frames = || {
            vec![
                Ok(Bytes::from_static(b"abc")),
                Ok(Bytes::from_static(b"de")),
            ]
        };
        assert_eq!(drain(frames(), 5).await, Ok(5));
        assert_eq!(
            drain(frames(), 6).await.map_err(|e| e.kind()),
            Err(StoreErrorKind::LocalRead)
        );
        assert_eq!(
            drain(frames(), 4).await.map_err(|e| e.kind()),
            Err(StoreErrorKind::LocalRead)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn only_silence_times_out() {
        let limit = Duration::from_secs(1);
        let progress = Progress::start();
        let slow_but_moving = async {
            for _ in 0..10 {
                tokio::time::sleep(Duration::from_millis(900)).await;
                progress.touch();
            }
            Ok(7)
        };
        assert_eq!(progress.guard(limit, slow_but_moving).await, Ok(7));

        let silent = std::future::pending::<Result<(), StoreError>>();
        let outcome = Progress::start().guard(limit, silent).await;
        assert_eq!(outcome.map_err(|e| e.kind()), Err(StoreErrorKind::Timeout));
    }
}
