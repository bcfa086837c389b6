// A Go web server with state in memory: static files from a directory, and a key-value store under /kv/.
package main

import (
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strings"
	"sync"
)

func main() {
	var mu sync.Mutex
	kv := map[string][]byte{}
	requests := 0
	http.HandleFunc("/kv/", func(w http.ResponseWriter, r *http.Request) {
		key := strings.TrimPrefix(r.URL.Path, "/kv/")
		mu.Lock()
		defer mu.Unlock()
		requests++
		switch r.Method {
		case http.MethodPut:
			body, err := io.ReadAll(r.Body)
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			kv[key] = body
			fmt.Fprintf(w, "%x", sha256.Sum256(body))
		case http.MethodGet:
			body, ok := kv[key]
			if !ok {
				http.NotFound(w, r)
				return
			}
			w.Write(body)
		}
	})
	http.HandleFunc("/random", func(w http.ResponseWriter, r *http.Request) {
		bytes := make([]byte, 16)
		rand.Read(bytes)
		fmt.Fprintf(w, "%x", bytes)
	})
	http.HandleFunc("/count", func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		requests++
		fmt.Fprint(w, requests)
	})
	http.Handle("/", http.FileServer(http.Dir(os.Args[2])))
	log.Fatal(http.ListenAndServe(os.Args[1], nil))
}
