package nodestatus

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/virgate/virgate/internal/nodereport"
	"github.com/virgate/virgate/sharing"
)

// TestEvict checks the requests and the meaning of refusals: the eviction is a dry run, and only then is the pod
// deleted, by its UID and with its own grace period.
func TestEvict(t *testing.T) {
	const pod = "/api/v1/namespaces/ns/pods/p"
	for _, test := range []struct {
		asked, deleted int
		meaning        error
	}{
		{http.StatusCreated, http.StatusOK, nil},
		{http.StatusTooManyRequests, 0, nodereport.ErrDisruptionBudget},
		{http.StatusForbidden, 0, nodereport.ErrMayNotEvict},
		{http.StatusNotFound, 0, nodereport.ErrPodGone},
		{http.StatusConflict, 0, nodereport.ErrPodGone},
		{http.StatusCreated, http.StatusForbidden, nodereport.ErrMayNotEvict},
		{http.StatusUnprocessableEntity, 0, nodereport.ErrMayNotEvict}, // An admission policy.
		{http.StatusCreated, http.StatusUnprocessableEntity, nodereport.ErrMayNotEvict},
		{http.StatusCreated, http.StatusNotFound, nodereport.ErrPodGone},
		{http.StatusCreated, http.StatusConflict, nodereport.ErrPodGone},
	} {
		var requests []string
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			requests = append(requests, r.Method+" "+r.URL.Path)
			body, err := io.ReadAll(r.Body)
			if err != nil || r.Header.Get("Content-Type") != "application/json" {
				t.Errorf("%v, %s", err, r.Header.Get("Content-Type"))
			}
			status, options := test.asked, &metav1.DeleteOptions{}
			if r.Method == http.MethodDelete {
				status, err = test.deleted, json.Unmarshal(body, options)
			} else {
				var got policyv1.Eviction
				err = json.Unmarshal(body, &got)
				options = got.DeleteOptions
				if got.Kind != "Eviction" || got.APIVersion != "policy/v1" || got.Name != "p" || got.Namespace != "ns" || r.URL.Query().Get("dryRun") != "All" {
					t.Errorf("%s %s", r.URL, body)
				}
			}
			if err != nil || options.GracePeriodSeconds != nil || options.Preconditions == nil || *options.Preconditions.UID != "u1" {
				t.Errorf("%s %s: %s, %v", r.Method, r.URL, body, err)
			}
			answer(w, status, "no")
		}))
		evictor, err := NewEvictor(&rest.Config{Host: server.URL}, nodeName)
		if err != nil {
			t.Fatal(err)
		}
		want := []string{"POST " + pod + "/eviction"}
		if test.deleted != 0 {
			want = append(want, "DELETE "+pod)
		}
		err = evictor.Evict(t.Context(), "ns", "p", "u1")
		if (err == nil) != (test.meaning == nil) || !errors.Is(err, test.meaning) || !slices.Equal(requests, want) {
			t.Errorf("%d, %d: %v after %q, want %v after %q", test.asked, test.deleted, err, requests, test.meaning, want)
		}
		server.Close()
	}
	if _, err := NewEvictor(nil, nodeName); err == nil {
		t.Error("without an API server")
	}
}

// TestOverLimitNotices checks that each change of a container's state is one event.
func TestOverLimitNotices(t *testing.T) {
	over := nodereport.OverLimit{Unit: "GPU-1", Container: sharing.Container{Namespace: "ns", Pod: "p", Name: "c"}, Text: "too much"}
	refused, evicted := over, over
	refused.Refused = "budget"
	evicted.Evicted = true
	other := over
	other.Unit = "GPU-2"
	found := warning(ReasonMemoryOverLimit, "too much")
	for _, test := range []struct {
		name       string
		last, next []nodereport.OverLimit
		want       []eventText
	}{
		{"over", nil, []nodereport.OverLimit{over}, []eventText{found}},
		{"still", []nodereport.OverLimit{over}, []nodereport.OverLimit{over}, nil},
		{"refused", []nodereport.OverLimit{over}, []nodereport.OverLimit{refused}, []eventText{warning(ReasonEvictionRefused, "pod ns/p is not evicted: budget")}},
		{"still refused", []nodereport.OverLimit{refused}, []nodereport.OverLimit{refused}, nil},
		{"evicted", []nodereport.OverLimit{over}, []nodereport.OverLimit{evicted}, []eventText{warning(ReasonEvicted, "pod ns/p is evicted: too much")}},
		{"on another GPU", []nodereport.OverLimit{over}, []nodereport.OverLimit{over, other}, []eventText{found}},
		{"gone", []nodereport.OverLimit{evicted}, nil, nil},
	} {
		got := newEvents(&nodereport.Report{OverLimit: test.last}, nodereport.Report{OverLimit: test.next})
		if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(eventText{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.name, diff)
		}
	}
}
