package trace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/virgate/virgate/internal/nvml"
)

// Limit is the size, in bytes, at which Record stops and from which Parse
// refuses a trace. A look at a node of eight boards takes some 50 kB.
const Limit = 64 << 20

// longestLine bounds a line, in bytes. The longest answer is the processes of a
// board, at 40 bytes each.
const longestLine = 1 << 20

// Parse reads a trace and returns a library that answers from it. An error
// names the line. Blank lines are none of the format; a trace that its recorder
// could not finish has a last line without an end, which is an error too.
//
// A call with the same arguments gets the answers of the trace one after the
// other, and then the last one again and again. One that the trace does not
// have gets NotSupported, but Init and Shutdown, which then work. EventSetWait
// returns each event, or error, of the trace once, and after that waits and
// times out.
//
// The library's methods may be called from any goroutine. Opening it again does
// not begin the trace anew.
func Parse(data []byte) (nvml.Library, error) {
	if len(data) > Limit {
		return nil, fmt.Errorf("trace: %d bytes, more than %d", len(data), Limit)
	}
	if len(data) > 0 && data[len(data)-1] != '\n' {
		return nil, fmt.Errorf("trace: line %d: cut off", bytes.Count(data, []byte("\n"))+1)
	}
	scanner := bufio.NewScanner(bytes.NewReader(data))
	scanner.Buffer(nil, longestLine)
	replay := &replay{answers: map[string][]line{}}
	number := 0
	for scanner.Scan() {
		number++
		read := replay.read
		if number == 1 {
			read = readHeader
		}
		if err := read(scanner.Bytes()); err != nil {
			return nil, fmt.Errorf("trace: line %d: %w", number, err)
		}
	}
	if err := scanner.Err(); err != nil {
		return nil, fmt.Errorf("trace: line %d: %w", number+1, err)
	}
	if number == 0 {
		return nil, errors.New("trace: empty, not even a header")
	}
	return replay, nil
}

func readHeader(text []byte) error {
	var h header
	if err := strictly(text, &h); err != nil {
		return fmt.Errorf("not the header of a trace: %w", err)
	}
	if h.Trace != version {
		return fmt.Errorf("version %d of the format, this program reads %d", h.Trace, version)
	}
	return nil
}

// read takes in a call.
func (r *replay) read(text []byte) error {
	var l line
	if err := strictly(text, &l); err != nil {
		return err
	}
	known, ok := callOf(l.Call)
	switch {
	case !ok:
		return fmt.Errorf("no call %q", l.Call)
	case len(l.Arguments) != known.arguments:
		return fmt.Errorf("%s has %d arguments, want %d", l.Call, len(l.Arguments), known.arguments)
	case l.Error != nil && l.Answer != nil:
		return fmt.Errorf("%s has both an answer and an error", l.Call)
	case l.Error != nil && l.Error.Return == nvml.Success:
		return fmt.Errorf("%s has an error of code %d, which is none", l.Call, int(l.Error.Return))
	case l.Error == nil:
		if err := known.answers(l.Answer); err != nil {
			return fmt.Errorf("answer of %s: %w", l.Call, err)
		}
	}
	r.add(l)
	return nil
}

// nothing says that there is no answer.
func nothing(answer json.RawMessage) error {
	if answer != nil {
		return fmt.Errorf("%s, want none", answer)
	}
	return nil
}

// is says that the answer is a T and nothing more.
func is[T any](answer json.RawMessage) error {
	if answer == nil {
		return errors.New("there is none")
	}
	var value T
	return strictly(answer, &value)
}

// strictly decodes one JSON value with the fields of the target and no others.
func strictly(text []byte, target any) error {
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(target); err != nil {
		return err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the value")
	}
	return nil
}
